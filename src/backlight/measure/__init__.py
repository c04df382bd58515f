"""Tensors to numbers: pure functions, on any device.

What replicates of a gradient say is at hand under its own names; each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Noise": "noise",
    "ReplicateError": "replicates",
    "SpectralEcho": "result",
    "spectral_echo": "measurement",
}

_MODULES = ("alignment", "echo", "noise", "shrinkage", "spectrum", "subspace")

__all__ = [
    "Noise",
    "ReplicateError",
    "SpectralEcho",
    "alignment",
    "echo",
    "noise",
    "shrinkage",
    "spectral_echo",
    "spectrum",
    "subspace",
]

if TYPE_CHECKING:
    from backlight.measure.spectra import alignment, echo, noise, shrinkage, spectrum, subspace
    from backlight.measure.spectra.measurement import spectral_echo
    from backlight.measure.spectra.noise import Noise
    from backlight.measure.spectra.replicates import ReplicateError
    from backlight.measure.spectra.result import SpectralEcho


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"backlight.measure.spectra.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"backlight.measure.spectra.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'backlight.measure' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
