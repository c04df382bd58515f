"""Step times of two runs by phase: a ratio with its interval, or why there is none. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from backlight.monitors.steptime.model.evidence import core_wait
from backlight.monitors.steptime.model.step_times import (
    CONFIDENCE,
    MIN_STEPS,
    NONE,
    Difference,
    Floats,
    PhaseTimes,
    Variation,
    difference,
    measure_variation,
    paired_difference,
    read_phases,
)
from backlight.store.read.run import Run
from backlight.text import number

T = TypeVar("T")

Side = Mapping[str, Floats]
"""Seconds of the steps, or medians of the runs, by phase."""

Centre = Callable[[Floats], Any]
Test = Callable[[Floats, Floats, float, Variation], Difference]

RUN_CONFIDENCE = 0.95
"""Of the interval of two runs, whose variation is part of it."""

STEP = "step"
"""Name of the row of the whole step."""

NEGLIGIBLE = 0.002
"""Share of a step below which a phase is not tested: only the clock's resolution would differ."""


@dataclass(frozen=True)
class TimeRow:
    """One phase in two runs: milliseconds of either, and the second over the first with its interval.

    ``ratio`` is that of the milliseconds, None where it was not tested; ``is_significant``: a difference is
    claimed, for which the interval must exclude 1. ``verdict`` is ``faster``, ``slower``, ``undecided`` and
    why, or why there is no test.
    """

    name: str
    first_ms: float
    second_ms: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    is_significant: bool = False
    verdict: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", self._verdict())

    def _verdict(self) -> str:
        if self.ratio is None or self.low is None or self.high is None:
            return "too short to test" if self.first_ms and self.second_ms else "not in both"
        if self.is_significant:
            return "slower" if self.ratio > 1 else "faster"
        return "undecided" if self.low <= 1 <= self.high else "undecided: steps drift"

    @property
    def text(self) -> str:
        """The ratio with its interval, as ``1.031 (1.022 to 1.040)``; empty where it was not tested."""
        if self.ratio is None or self.low is None or self.high is None:
            return ""
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class TimeComparison:
    """Step times of two runs: the step first, then its phases.

    ``counts`` are steady steps of each run, or pairs; ``confidence`` is that of the interval of the step.
    ``variation`` between equal runs is part of the intervals; it was measured over ``repeats`` runs, or is
    assumed. Without ``rows``, ``trouble`` gives the reason. ``names`` are those of the runs. ``verdict`` is
    the result in one line, ``basis`` what the intervals rest on.
    """

    counts: tuple[int, int]
    rows: tuple[TimeRow, ...]
    confidence: float
    trouble: tuple[str, ...] = ()
    variation: Variation = NONE
    repeats: int = 0
    names: tuple[str, str] = ("A", "B")
    verdict: str = field(init=False, default="")
    basis: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", self._verdict())
        object.__setattr__(self, "basis", self._basis())

    def _verdict(self) -> str:
        if not self.rows:
            return f"Step times are not compared: {', '.join(self.trouble)}."
        step, (baseline, other) = self.rows[0], self.names
        if not step.is_significant:
            return f"Step time {step.verdict}. {other}÷{baseline} is {step.text}."
        return f"Step time: {other} is {step.verdict} than {baseline}. {other}÷{baseline} is {step.text}."

    @property
    def variation_text(self) -> str:
        """How much equal runs vary, and whether that was measured."""
        deviation = f"{number(100 * self.variation.deviation, 3)} %"
        if self.variation.is_measured:
            return f"equal runs vary by {deviation}, measured over {self.repeats} runs"
        return f"equal runs are assumed to vary by {deviation} (no steady repeat to measure it)"

    def _basis(self) -> str:
        (first, second), (baseline, other) = self.counts, self.names
        steps = f"{first:,} steady steps of {baseline} and {second:,} of {other}"
        levels = f"{100 * self.confidence:.0f} % (all phases together {100 * CONFIDENCE:.0f} %)"
        return f"Intervals of {levels} from {steps}; {self.variation_text}"


def compare_times(
    first: Run,
    second: Run,
    repeats: Sequence[Sequence[Mapping[str, float]]] = (),
    confidence: float = RUN_CONFIDENCE,
    names: tuple[str, str] = ("A", "B"),
) -> TimeComparison:
    """Compare the steady steps of two runs, phase by phase.

    ``repeats`` are groups of equal runs, each as its medians by phase: how much they differ is part of the
    intervals.
    """
    runs = dict(zip(names, (first, second), strict=True))
    parts = {name: table.steady() for name, run in runs.items() if (table := read_phases(run)) is not None}
    if len(parts) < 2:
        missing = tuple(f"{name} has no phase times" for name in runs if name not in parts)
        return TimeComparison((0, 0), (), confidence, missing, names=names)
    trouble = tuple(f"{name}: {steady.trouble}" for name, (steady, _) in parts.items() if steady.trouble)
    is_drifting = bool(trouble)
    baseline, other = (rest for _, rest in parts.values())
    counts = (len(baseline.steps), len(other.steps))
    if min(counts) < MIN_STEPS:
        return TimeComparison(counts, (), confidence, trouble, names=names)
    waits = {name: lost_share(run) for name, run in runs.items()}
    trouble += tuple(
        f"{name}: its thread waited for a core {wait:.0%} of the time, which widens the intervals"
        for name, wait in waits.items()
        if wait > NEGLIGIBLE
    )
    comparison = compare_steady(baseline, other, repeats, confidence)
    rows = tuple(widen(row, *waits.values(), is_drifting=is_drifting) for row in comparison.rows)
    return dataclasses.replace(comparison, rows=rows, trouble=trouble, names=names)


def compare_steady(
    baseline: PhaseTimes,
    other: PhaseTimes,
    repeats: Sequence[Sequence[Mapping[str, float]]] = (),
    confidence: float = RUN_CONFIDENCE,
) -> TimeComparison:
    """Compare two tables of steady steps; see :func:`compare_times`."""

    def variation(name: str) -> Variation:
        return measure_variation([[run[name] for run in group if name in run] for group in repeats])

    rows = _step_rows(_columns(baseline), _columns(other), difference, np.median, confidence, variation)
    measured = sum(len(group) for group in repeats if len(group) > 1)
    counts = (len(baseline.steps), len(other.steps))
    return TimeComparison(counts, tuple(rows), confidence, (), variation(STEP), measured)


def medians(run: Run, attempt: int | None = None) -> dict[str, float] | None:
    """Return the median seconds of the steady steps by phase; None where they are too few, or drift."""
    table = read_phases(run, attempt=attempt)
    if table is None:
        return None
    steady, rest = table.steady()
    return None if steady.trouble or len(rest.steps) < MIN_STEPS else medians_of(rest)


def medians_of(table: PhaseTimes) -> dict[str, float]:
    """Return the median seconds of a table of steady steps by phase, with the step."""
    return {name: float(np.median(column)) for name, column in _columns(table).items()}


def lost_share(run: Run) -> float:
    """Return the share of a run in which its thread waited for a core; 0 where that was not recorded."""
    return min(0.95, core_wait(run) or 0.0)


def widen(row: TimeRow, first: float, second: float, *, is_drifting: bool) -> TimeRow:
    """Extend the interval to what either run would have taken without its waits for a core.

    The steps of one run do not show how busy the machine was during the other. A run that drifts supports
    no claim.
    """
    if row.ratio is None or row.low is None or row.high is None:
        return row
    low, high = row.low * (1 - second), row.high / (1 - first)
    is_significant = not is_drifting and not low <= 1.0 <= high
    return dataclasses.replace(row, low=low, high=high, is_significant=is_significant)


def compare_pairs(
    first: Sequence[Mapping[str, float]],
    second: Sequence[Mapping[str, float]],
    confidence: float = CONFIDENCE,
) -> TimeComparison:
    """Compare median seconds by phase of interleaved runs; ``first[i]`` and ``second[i]`` are a pair.

    The times of a row are geometric means of these medians: their ratio is the mean of the pairs' ratios.
    """
    baseline, other = (
        {
            name: np.array([run.get(name, 0.0) for run in runs])
            for name in dict.fromkeys(n for r in runs for n in r)
        }
        for runs in (first, second)
    )
    rows = _step_rows(baseline, other, _paired, _geometric_mean, confidence)
    return TimeComparison((len(first), len(second)), tuple(rows), confidence)


def _geometric_mean(values: Floats) -> float:
    with np.errstate(divide="ignore"):  # the mean of a phase that took no time in one run is 0
        return float(np.exp(np.log(values).mean()))


def interleave(
    measure: Callable[[int, int], T], pairs: int, on_run: Callable[[int, int], None]
) -> tuple[list[T], list[T]]:
    """Return ``pairs`` measurements of side 0 and of side 1, taken alternately by ``measure(side, pair)``.

    What disturbs the machine disturbs both. The order changes from pair to pair: what the first run warms up,
    it warms up for both. ``on_run`` is called before each run with the runs done and all runs, and once after
    the last.
    """
    sides: tuple[list[T], list[T]] = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            on_run(len(sides[0]) + len(sides[1]), 2 * pairs)
            sides[side].append(measure(side, pair))
    on_run(2 * pairs, 2 * pairs)
    return sides


def _columns(table: PhaseTimes) -> dict[str, Floats]:
    return {STEP: table.total, **{name: table.phase(name) for name in table.names}}


def _paired(baseline: Floats, other: Floats, confidence: float, _: Variation) -> Difference:
    return paired_difference(baseline, other, confidence)


def _step_rows(
    base: Side,
    other: Side,
    test: Test,
    centre: Centre,
    confidence: float,
    variation: Callable[[str], Variation] = lambda _: NONE,
) -> list[TimeRow]:
    """Compare the step, and each phase that is long enough in every step of both."""
    least = [NEGLIGIBLE * float(np.median(side[STEP])) for side in (base, other)]
    levels = {STEP: confidence, **levels_of((base, other), least)}
    names = dict.fromkeys([STEP, *base, *other])
    return [
        compare_series(name, base, other, test, levels.get(name), variation(name), centre) for name in names
    ]


def levels_of(sides: tuple[Side, Side], least: Sequence[float]) -> dict[str, float]:
    """Return the confidence of the intervals of all series whose medians reach ``least``.

    All of them together raise no more false alarms than one interval of 99 % (Bonferroni).
    """
    tested = [
        name
        for name in sides[0]
        if name != STEP
        and all(
            name in side and (side[name] > 0).all() and float(np.median(side[name])) >= low
            for side, low in zip(sides, least, strict=True)
        )
    ]
    return dict.fromkeys(tested, 1 - (1 - CONFIDENCE) / max(1, len(tested)))


def compare_series(
    name: str,
    base: Side,
    other: Side,
    test: Test,
    level: float | None,
    variation: Variation,
    centre: Centre = np.median,
) -> TimeRow:
    """Return the ``centre`` of one series in either run, and with a ``level`` of confidence their ratio."""
    first, second = (float(centre(side[name])) * 1e3 if name in side else 0.0 for side in (base, other))
    if level is None:
        return TimeRow(name, first, second)
    change = test(base[name], other[name], level, variation)
    return TimeRow(name, first, second, change.ratio, change.low, change.high, change.is_significant)
