"""What is said of a run on grokking: the verdicts, the conditions, the sweep, as frozen records. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from backlight.monitors.grokking.model.curves import Interval


class GrokkingVerdict(enum.StrEnum):
    """What is said of the accuracies of a run."""

    GROKKING = "grokking"
    NO_DELAY = "no-delay"
    MEMORISED = "memorised"
    NOT_FITTED = "not-fitted"
    UNSTABLE = "unstable"
    THRESHOLD_ARTEFACT = "threshold-artefact"
    INSUFFICIENT_DATA = "insufficient-data"
    CENSORED = "censored"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the verdict; ``held`` is None where the data cannot tell."""

    name: str
    expected: str
    got: str
    held: bool | None


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One point of the sweep: its lines, its times, and whether it would be called grokking."""

    train_accuracy: float
    test_share: float
    memorised: Interval | None
    generalised: Interval | None
    grokking: bool


@dataclass(frozen=True)
class Detection:
    """A verdict with all that it rests on.

    ``memorised`` and ``generalised`` are intervals (previous log, this log], None where the run never
    did. ``ratio`` bounds t_generalise / t_memorise from the two intervals; its upper bound is None where
    there is none. ``test_accuracy`` is the one from which t_generalise is counted, ``memorised_test`` the
    test accuracy when the run memorised.
    ``test_size_known`` is False where ``test_size`` is a lower bound read off the values.
    """

    verdict: GrokkingVerdict
    strong: bool
    claim: str
    memorised: Interval | None
    generalised: Interval | None
    ratio: tuple[float, float | None] | None
    plateau: float | None
    test_accuracy: float | None
    memorised_test: float | None
    chance: float | None
    test_size: int
    test_size_known: bool
    wilson: tuple[float, float] | None
    logs: tuple[int, int]
    last_step: int
    conditions: tuple[Condition, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    notes: tuple[str, ...] = ()
