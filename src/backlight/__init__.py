"""backlight: see inside the backward pass of any PyTorch training, unchanged."""

from __future__ import annotations

__version__ = "0.1.0"
