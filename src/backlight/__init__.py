"""backlight: see inside the backward pass of any PyTorch training script, unchanged.

The public names are loaded when they are first used, so that reading a run never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Collected": "backlight.monitors.health.instrument.collect",
    "Evidence": "backlight.records",
    "Finding": "backlight.records",
    "GroupValues": "backlight.monitors.health.instrument.collect",
    "Monitor": "backlight.monitor",
    "Pending": "backlight.monitors.health.instrument.collect",
    "Run": "backlight.store.read.run",
    "Severity": "backlight.records",
    "SpectralEcho": "backlight.measure.spectra.measurement",
    "StopTraining": "backlight.capture.training_stop",
    "Watch": "backlight.session.watch",
    "collect": "backlight.monitors.health.instrument.collect",
    "collect_groups": "backlight.monitors.health.instrument.collect",
    "findings_of": "backlight.findings.evaluate",
    "gathered": "backlight.capture.model_state",
    "gram": "backlight.monitors.grokking.instrument.gram.gram_measurement",
    "ntk": "backlight.monitors.grokking.instrument.gram.ntk",
    "open_run": "backlight.store.read.run",
    "outer_product": "backlight.measure.gram.outer",
    "spectral_echo": "backlight.measure.spectra.measurement",
    "to_pandas": "backlight.store.export",
    "to_polars": "backlight.store.export",
    "watch": "backlight.session.watch",
}

__all__ = [
    "Collected",
    "Evidence",
    "Finding",
    "GroupValues",
    "Monitor",
    "Pending",
    "Run",
    "Severity",
    "SpectralEcho",
    "StopTraining",
    "Watch",
    "__version__",
    "collect",
    "collect_groups",
    "findings_of",
    "gathered",
    "gram",
    "ntk",
    "open_run",
    "outer_product",
    "spectral_echo",
    "to_pandas",
    "to_polars",
    "watch",
]

if TYPE_CHECKING:
    from backlight.capture.model_state import gathered
    from backlight.capture.training_stop import StopTraining
    from backlight.findings.evaluate import findings_of
    from backlight.measure.gram.outer import outer_product
    from backlight.measure.spectra.measurement import SpectralEcho, spectral_echo
    from backlight.monitor import Monitor
    from backlight.monitors.grokking.instrument.gram.gram_measurement import gram
    from backlight.monitors.grokking.instrument.gram.ntk import ntk
    from backlight.monitors.health.instrument.collect import (
        Collected,
        GroupValues,
        Pending,
        collect,
        collect_groups,
    )
    from backlight.records import Evidence, Finding, Severity
    from backlight.session.watch import Watch, watch
    from backlight.store.export import to_pandas, to_polars
    from backlight.store.read.run import Run, open_run


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'backlight' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Register the cell magic ``%%backlight``: ``%load_ext backlight`` in a notebook."""
    importlib.import_module("backlight.integrations.cell_magic").register(shell)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
