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
    SeriesError,
    difference,
    paired_difference,
    read_phases,
)
from backlight.store.read.run import Run

T = TypeVar("T")

STEP = "step"
"""Name of the row of the whole step."""

NEGLIGIBLE = 0.002
"""Share of a step below which a phase is not tested: only the clock's resolution would differ."""


@dataclass(frozen=True)
class TimeRow:
    """One phase in two runs: medians in milliseconds, and the second over the first.

    ``ratio`` with ``low`` and ``high`` is None where the phase is missing in one run or too short to
    test; ``found`` is whether the interval excludes 1.
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

    ``counts`` are steady steps of each run, or pairs. Without ``rows``, ``trouble`` gives the reason.
    ``confidence`` is that of the interval of the step; those of n phases have 1 - (1 - confidence) / n, so
    that all of them together raise no more false alarms than the step alone (Bonferroni).
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
    tables = {name: table for name, run in runs.items() if (table := read_phases(run)) is not None}
    if len(tables) < 2:
        missing = tuple(f"the {name} run has no phase times" for name in runs if name not in tables)
        return TimeComparison((0, 0), (), confidence, missing)
    parts = {name: table.steady() for name, table in tables.items()}
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
    rows = (
        widen(row, waits["first"], waits["second"], is_drifting=is_drifting)
        for row in _rows(_columns(one), _columns(other), difference, confidence)
    )
    return TimeComparison(counts, tuple(rows), confidence, trouble)


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
    fewest = min(len(first), len(second))
    if fewest < 3:
        raise SeriesError(f"{fewest} pairs: an interval takes 3 or more")
    one, other = (
        {name: np.array([run.get(name, 0.0) for run in runs]) for name in _names(runs)}
        for runs in (first, second)
    )
    rows = _rows(one, other, paired_difference, confidence)
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


def _names(runs: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run))


def _columns(table: PhaseTimes) -> dict[str, Floats]:
    return {STEP: table.total, **{name: table.phase(name) for name in table.names}}


def _rows(
    one: Mapping[str, Floats],
    other: Mapping[str, Floats],
    test: Callable[[Floats, Floats, float], Difference],
    confidence: float,
) -> list[TimeRow]:
    names = [name for name in dict.fromkeys([*one, *other]) if name != STEP]
    tested = [name for name in names if all(_is_testable(name, side) for side in (one, other))]
    rows = []
    for name in [STEP, *names]:
        first, second = (float(np.median(side[name])) * 1e3 if name in side else 0.0 for side in (one, other))
        if name != STEP and name not in tested:
            rows.append(TimeRow(name, first, second))
            continue
        level = confidence if name == STEP else 1 - (1 - confidence) / max(1, len(tested))
        found = test(one[name], other[name], level)
        rows.append(TimeRow(name, first, second, found.ratio, found.low, found.high, found.is_significant))
    return rows


def _is_testable(name: str, side: Mapping[str, Floats]) -> bool:
    """Return whether every step has the phase, and it is long enough to be tested."""
    if name not in side or not (side[name] > 0).all():
        return False
    return float(np.median(side[name])) >= NEGLIGIBLE * float(np.median(side[STEP]))
