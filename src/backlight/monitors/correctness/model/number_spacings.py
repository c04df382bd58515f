"""Spacing of the numbers of a type. No torch."""

from __future__ import annotations

SPACING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
"""Mean distance of neighbouring numbers as a share of their size, about, by type."""
