"""What a command can be refused for, as one line and exit code 2."""

from __future__ import annotations

from backlight.registry import UnknownNameError
from backlight.store.errors import StoreError

REFUSALS: tuple[type[Exception], ...] = (
    ValueError,
    OSError,
    StoreError,
    UnknownNameError,
    ModuleNotFoundError,
)
"""Errors whose message tells what, where, expected, got and the way out."""
