"""Singular values of the gradient over replicates, of a live run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backlight.extras import require
from backlight.monitor import Monitor
from backlight.monitors.spectra.settings import SpectraSettings

if TYPE_CHECKING:
    from backlight.session.settings import Settings


class SpectraMonitor(Monitor):
    """Declares the monitor; what measures is imported only where it is requested."""

    name = "spectra"

    @classmethod
    def from_settings(cls, settings: Settings) -> Monitor | None:
        """Return the monitor with ``spectra`` of the settings."""
        if cls.name not in settings.monitors:
            return None
        require("h5py", "scipy", what="the monitor spectra")
        # Imports much that the other monitors do not need.
        from backlight.monitors.spectra.instrument.replicate_monitor import ReplicateMonitor  # noqa: PLC0415

        return ReplicateMonitor(SpectraSettings.of(settings), settings.every)
