"""The thresholds of the spectra monitor: one frozen class, each field with its reason and its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from backlight.findings.limits import Limits, limit

_CHOSEN = "chosen: injected faults found, controls silent, see the tests of the condition"


@dataclass(frozen=True)
class Thresholds(Limits):
    """Every number that a condition of this monitor compares with."""

    monitor: ClassVar[str] = "spectra"

    batch_factor: float = limit(
        10.0,
        "a batch this many times larger or smaller than the noise scale is far from it: at ten times, "
        "nine tenths of the gain of a larger batch are gone, or most of each step is noise",
        source="McCandlish et al., arXiv:1812.06162, section 2.2: the gain of a batch is B / (B + B_simple)",
        low=1.0,
    )
    collapse_rank: float = limit(
        1.5,
        "an update of stable rank below this is nearly one direction, whatever the shape of the layer",
        source=_CHOSEN,
        low=1.0,
    )
    collapse_share: float = limit(
        0.25, "and has lost three quarters of the rank that it had before", source=_CHOSEN, high=1.0
    )
    misfit: float = limit(
        0.25,
        "reverbs contradict the model behind the echo where it leaves a quarter of them over",
        source=_CHOSEN,
        high=2.0,
    )
    above_null: float = limit(
        3.0, "an echo below this many times what chance shows is not judged by its misfit", source=_CHOSEN
    )
    replicates: int = limit(
        8, "fewer replicates give pairs whose mean is dominated by single ones", source=_CHOSEN, low=3.0
    )
    interval_width: float = limit(
        0.2, "an echo that is known no better than this cannot rank directions", source=_CHOSEN, high=2.0
    )
