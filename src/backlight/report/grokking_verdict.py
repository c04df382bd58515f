"""The verdict on grokking as the report takes it from its caller: words and numbers, no evaluation here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backlight.store.read.run import Run

Between = tuple[int, int]
"""A time that logs bound: later than the first step, at the second at the latest."""


@dataclass(frozen=True, slots=True)
class Row:
    """One condition of the verdict; ``held`` is None where the data cannot tell."""

    name: str
    expected: str
    got: str
    held: bool | None


@dataclass(frozen=True, slots=True)
class Followed:
    """How a measure goes with the test accuracy, and the control's; None is not measured."""

    measure: str
    correlation: float | None
    lead: int
    control: float | None
    levels: tuple[float | None, float | None]
    conclusion: str


@dataclass(frozen=True)
class Learning:
    """A verdict with its times, its conditions, the control's run and what follows the test accuracy.

    ``swept`` counts the lines of the sweep at which the verdict held, and all of them. ``changes`` are
    steps at which the test accuracy changes its level, None where that was not looked for.
    """

    verdict: str
    claim: str
    memorised: Between | None = None
    generalised: Between | None = None
    conditions: Sequence[Row] = ()
    swept: tuple[int, int] | None = None
    notes: Sequence[str] = ()
    control: Run | None = None
    control_verdict: str = ""
    control_claim: str = ""
    is_control: bool = False
    following: Sequence[Followed] = ()
    changes: Sequence[int] | None = None
