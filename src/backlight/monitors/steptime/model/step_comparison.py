"""Step times of two runs by phase: a ratio with its interval, or why there is none. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from backlight.monitors.steptime.model.evidence import read_runtime_info
from backlight.monitors.steptime.model.step_times import (
    CONFIDENCE,
    MIN_STEPS,
    Difference,
    Floats,
    PhaseTimes,
    difference,
    paired_difference,
    read_phases,
)
from backlight.store.read.run import Run

T = TypeVar("T")

Side = Mapping[str, Floats]
"""Seconds of the steps, or medians of the runs, by phase."""

Test = Callable[[Floats, Floats, float], Difference]

STEP = "step"
"""Name of the row of the whole step."""

NEGLIGIBLE = 0.002
"""Share of a step below which a phase is not tested: only the clock's resolution would differ."""


@dataclass(frozen=True)
class TimeRow:
    """One phase in two runs: medians in milliseconds, and the second over the first with its interval.

    ``ratio`` is None where it was not tested; ``found`` is whether the interval excludes 1.
    """

    name: str
    first_ms: float
    second_ms: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    found: bool = False

    @property
    def text(self) -> str:
        """The difference, as ``+3.1 % (+2.2 to +4.0 %)``."""
        if self.ratio is None or self.low is None or self.high is None:
            return "too short to test" if self.first_ms and self.second_ms else "not in both"
        change = [100 * (value - 1) for value in (self.ratio, self.low, self.high)]
        text = f"{change[0]:+.1f} % ({change[1]:+.1f} to {change[2]:+.1f} %)"
        return text if self.found else f"no difference found: {text}"


@dataclass(frozen=True)
class TimeComparison:
    """Step times of two runs: the step first, then its phases.

    ``counts`` are steady steps of each run, or pairs; ``confidence`` is that of the interval of the step.
    Without ``rows``, ``trouble`` gives the reason.
    """

    counts: tuple[int, int]
    rows: tuple[TimeRow, ...]
    confidence: float
    trouble: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if not self.rows:
            return f"step times are not compared: {', '.join(self.trouble)}"
        step = self.rows[0]
        if not step.found:
            return f"step time: {step.text}"
        direction = "slower" if (step.ratio or 1.0) > 1 else "faster"
        moved = [row.name.replace("_", " ") for row in self.rows[1:] if row.found]
        where = f"; phases that differ: {', '.join(moved)}" if moved else ""
        return f"step time: the second is {direction}, {step.text}{where}"


def compare_times(first: Run, second: Run, confidence: float = CONFIDENCE) -> TimeComparison:
    """Compare the steady steps of two runs, phase by phase; the caller checks that they are comparable."""
    runs = {"first": first, "second": second}
    parts = {name: table.steady() for name, run in runs.items() if (table := read_phases(run)) is not None}
    if len(parts) < 2:
        missing = tuple(f"the {name} run has no phase times" for name in runs if name not in parts)
        return TimeComparison((0, 0), (), confidence, missing)
    trouble = tuple(f"{name} run: {steady.trouble}" for name, (steady, _) in parts.items() if steady.trouble)
    is_drifting = bool(trouble)
    one, other = (rest for _, rest in parts.values())
    counts = (len(one.steps), len(other.steps))
    if min(counts) < MIN_STEPS:
        return TimeComparison(counts, (), confidence, trouble)
    waits = {name: core_wait(run) for name, run in runs.items()}
    trouble += tuple(
        f"{name} run: its thread waited for a core {wait:.0%} of the time; the intervals are widened by that"
        for name, wait in waits.items()
        if wait > NEGLIGIBLE
    )
    rows = _step_rows(_columns(one), _columns(other), difference, confidence)
    widened = (widen(row, waits["first"], waits["second"], is_drifting=is_drifting) for row in rows)
    return TimeComparison(counts, tuple(widened), confidence, trouble)


def core_wait(run: Run) -> float:
    """Return the share of a run in which its thread waited for a core; 0 where that was not recorded."""
    info = read_runtime_info(run)
    return min(0.95, float((info.payload.get("core_wait") if info is not None else None) or 0.0))


def widen(row: TimeRow, first: float, second: float, *, is_drifting: bool) -> TimeRow:
    """Extend the interval to what either run would have taken without its waits for a core.

    The steps of one run do not show how busy the machine was during the other. A run that drifts supports
    no claim.
    """
    if row.ratio is None or row.low is None or row.high is None:
        return row
    low, high = row.low * (1 - second), row.high / (1 - first)
    return dataclasses.replace(row, low=low, high=high, found=not is_drifting and not low <= 1.0 <= high)


def compare_pairs(
    first: Sequence[Mapping[str, float]],
    second: Sequence[Mapping[str, float]],
    confidence: float = CONFIDENCE,
) -> TimeComparison:
    """Compare median seconds by phase of interleaved runs; ``first[i]`` and ``second[i]`` are a pair."""
    one, other = (
        {
            name: np.array([run.get(name, 0.0) for run in runs])
            for name in dict.fromkeys(n for r in runs for n in r)
        }
        for runs in (first, second)
    )
    rows = _step_rows(one, other, paired_difference, confidence)
    return TimeComparison((len(first), len(second)), tuple(rows), confidence)


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


def _step_rows(one: Side, other: Side, test: Test, confidence: float) -> list[TimeRow]:
    """Compare the step, and each phase that is long enough in every step of both."""
    least = [NEGLIGIBLE * float(np.median(side[STEP])) for side in (one, other)]
    levels = {STEP: confidence, **levels_of((one, other), least, confidence)}
    names = dict.fromkeys([STEP, *one, *other])
    return [compare_series(name, one, other, test, levels.get(name)) for name in names]


def levels_of(sides: tuple[Side, Side], least: Sequence[float], confidence: float) -> dict[str, float]:
    """Return the confidence of the intervals of all series whose medians reach ``least``.

    All of them together raise no more false alarms than one interval with ``confidence`` (Bonferroni).
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
    return dict.fromkeys(tested, 1 - (1 - confidence) / max(1, len(tested)))


def compare_series(
    name: str,
    one: Side,
    other: Side,
    test: Callable[[Floats, Floats, float], Difference],
    level: float | None,
) -> TimeRow:
    """Return the medians of one series, and with a ``level`` of confidence their difference."""
    first, second = (float(np.median(side[name])) * 1e3 if name in side else 0.0 for side in (one, other))
    if level is None:
        return TimeRow(name, first, second)
    found = test(one[name], other[name], level)
    return TimeRow(name, first, second, found.ratio, found.low, found.high, found.is_significant)
