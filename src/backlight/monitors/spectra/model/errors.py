"""What the monitor refuses."""

from __future__ import annotations


class SpectraError(ValueError):
    """Spectra that cannot be measured: the message says of what, why, and the way out."""
