"""Step times of two runs side by side: by phase a ratio with its interval, or why there is none. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backlight.monitors.steptime.model.phase_times import Recorded, read_phases
from backlight.monitors.steptime.model.steady_state import (
    CONFIDENCE,
    Difference,
    Floats,
    SeriesError,
    difference,
    paired_difference,
)
from backlight.monitors.steptime.model.wording import circumstances
from backlight.store.read.run import Run

STEP = "step"
"""Name of the row of the whole step."""

NEGLIGIBLE = 0.002
"""Share of a step below which a phase is not tested: a clock's resolution is then what differs."""


@dataclass(frozen=True)
class TimeRow:
    """One phase in two runs: medians in milliseconds, and the second over the first.

    ``ratio`` with ``low`` and ``high`` is None where the phase is missing in one run or too short to
    test; ``found`` says whether the interval leaves out 1.
    """

    name: str
    first_ms: float
    second_ms: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    found: bool = False

    @property
    def words(self) -> str:
        """Say the difference, as ``+3.1 % (+2.2 to +4.0 %)``."""
        if self.ratio is None or self.low is None or self.high is None:
            return "too short to test" if self.first_ms and self.second_ms else "not in both"
        change = [100 * (value - 1) for value in (self.ratio, self.low, self.high)]
        told = f"{change[0]:+.1f} % ({change[1]:+.1f} to {change[2]:+.1f} %)"
        return told if self.found else f"no difference found: {told}"


@dataclass(frozen=True)
class TimeComparison:
    """Step times of two runs.

    Attributes
    ----------
    counts:
        Steady steps of each run, or pairs of runs.
    rows:
        The step first, then its phases. Empty where nothing can be said; then ``trouble`` says why.
    confidence:
        Of the interval of the step. Those of n phases have 1 - (1 - confidence) / n, so that all of
        them together raise no more false alarms than the step alone (Bonferroni).
    trouble:
        What speaks against the numbers, or why there are none.
    """

    counts: tuple[int, int]
    rows: tuple[TimeRow, ...]
    confidence: float
    trouble: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Say in one line what was found."""
        if not self.rows:
            return f"step times are not compared: {', '.join(self.trouble)}"
        step = self.rows[0]
        if not step.found:
            return f"step time: {step.words}"
        direction = "slower" if (step.ratio or 1.0) > 1 else "faster"
        moved = [row.name.replace("_", " ") for row in self.rows[1:] if row.found]
        where = f"; phases that differ: {', '.join(moved)}" if moved else ""
        return f"step time: the second is {direction}, {step.words}{where}"


def compare_times(first: Run, second: Run, confidence: float = CONFIDENCE) -> TimeComparison:
    """Compare the steady steps of two runs, phase by phase.

    Whether the runs are alike is for the caller to check: a difference between unlike runs is none.
    """
    tables = read_phases(first), read_phases(second)
    places = ("first", "second")
    missing = [
        f"the {place} run has no phase times"
        for place, table in zip(places, tables, strict=True)
        if table is None
    ]
    if tables[0] is None or tables[1] is None:
        return TimeComparison((0, 0), (), confidence, tuple(missing))
    parts = [table.steady() for table in tables if table is not None]
    trouble = tuple(
        f"{place} run: {steady.trouble}"
        for place, (steady, _) in zip(places, parts, strict=True)
        if steady.trouble
    )
    counts = (len(parts[0][1].steps), len(parts[1][1].steps))
    if min(counts) < 4:
        return TimeComparison(counts, (), confidence, trouble)
    rows = _rows(_columns(parts[0][1]), _columns(parts[1][1]), difference, confidence)
    waits = [core_wait(run) for run in (first, second)]
    trouble += tuple(
        f"{place} run: its thread waited {wait:.0%} of the time for a core; the intervals are widened by that"
        for place, wait in zip(places, waits, strict=True)
        if wait > NEGLIGIBLE
    )
    drifting = any(steady.trouble for steady, _ in parts)
    stretched = tuple(widened(row, waits[0], waits[1], drifting=drifting) for row in rows)
    return TimeComparison(counts, stretched, confidence, trouble)


def core_wait(run: Run) -> float:
    """Return the share of a run in which its thread waited for a core; 0 where that was not recorded."""
    told = circumstances(run)
    return min(0.95, float((told.payload.get("core_wait") if told is not None else None) or 0.0))


def widened(row: TimeRow, first: float, second: float, *, drifting: bool) -> TimeRow:
    """Let the interval hold what either run would have taken without its waits for a core.

    Steps of one run say nothing of how busy the machine was in the other. Of a run that drifts nothing
    is claimed.
    """
    if row.ratio is None or row.low is None or row.high is None:
        return row
    low, high = row.low * (1 - second), row.high / (1 - first)
    return dataclasses.replace(row, low=low, high=high, found=not drifting and not low <= 1.0 <= high)


def compare_pairs(
    first: Sequence[Mapping[str, float]],
    second: Sequence[Mapping[str, float]],
    confidence: float = CONFIDENCE,
) -> TimeComparison:
    """Compare medians of interleaved runs, ``first[i]`` measured beside ``second[i]``.

    Parameters
    ----------
    first, second:
        Median seconds of each run, by phase and for the whole :data:`STEP`.
    confidence:
        Of the interval of the step.

    Raises
    ------
    SeriesError
        If there are fewer than three pairs.
    """
    sides = [
        {name: np.array([run.get(name, 0.0) for run in runs]) for name in _names(runs)}
        for runs in (first, second)
    ]
    if min(len(first), len(second)) < 3:
        raise SeriesError(f"{min(len(first), len(second))} pairs: an interval takes 3 or more")
    rows = _rows(sides[0], sides[1], paired_difference, confidence)
    return TimeComparison((len(first), len(second)), tuple(rows), confidence)


def _names(runs: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run))


def _columns(table: Recorded) -> dict[str, Floats]:
    return {STEP: table.total, **{name: table.phase(name) for name in table.names}}


def _rows(
    one: Mapping[str, Floats],
    other: Mapping[str, Floats],
    test: Callable[[Floats, Floats, float], Difference],
    confidence: float,
) -> list[TimeRow]:
    steps = float(np.median(one[STEP])), float(np.median(other[STEP]))
    names = [name for name in dict.fromkeys([*one, *other]) if name != STEP]
    tested = [name for name in names if _testable(name, one, other, steps)]
    rows = []
    for name in [STEP, *names]:
        first = float(np.median(one[name])) * 1e3 if name in one else 0.0
        second = float(np.median(other[name])) * 1e3 if name in other else 0.0
        if name != STEP and name not in tested:
            rows.append(TimeRow(name, first, second))
            continue
        level = confidence if name == STEP else 1 - (1 - confidence) / max(1, len(tested))
        found = test(one[name], other[name], level)
        rows.append(TimeRow(name, first, second, found.ratio, found.low, found.high, found.found))
    return rows


def _testable(
    name: str, one: Mapping[str, Floats], other: Mapping[str, Floats], steps: tuple[float, float]
) -> bool:
    """Tell whether a phase is there in every step of both runs, and long enough to be tested."""
    if name not in one or name not in other or not (one[name] > 0).all() or not (other[name] > 0).all():
        return False
    return all(
        float(np.median(side[name])) >= NEGLIGIBLE * step
        for side, step in zip((one, other), steps, strict=True)
    )
