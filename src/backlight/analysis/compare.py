"""Comparison of two runs, or the reasons why they are not comparable. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.analysis.fingerprint_diff import Difference, Role, assign_roles, differences
from backlight.analysis.op_times import compare_kinds
from backlight.analysis.repeats import groups_of_repeats
from backlight.monitors.health.model.score import health_series
from backlight.monitors.steptime.model.step_comparison import RUN_CONFIDENCE, TimeComparison, compare_times
from backlight.store.read.run import Run, Scalar

MAX_POINTS = 256
"""Common steps that a track lists, evenly spread; its statistics are of all of them."""

MAX_PARAMETERS = 10
"""Parameters whose medians differ most, per column."""

COLUMNS = (("gradient", "rms"), ("update", "ratio"))
"""Per-parameter columns whose medians over the common steps are compared."""


@dataclass(frozen=True)
class Side:
    """One of the two runs by itself; shown also where the runs are not comparable."""

    name: str
    path: str
    status: str
    attempts: int
    steps: int
    last_loss: float | None
    clipped_share: float | None


@dataclass(frozen=True)
class Track:
    """One series at the steps that both runs recorded; None where a value is not finite or not measured.

    ``first_difference`` is the first common step at which the values differ at all.
    """

    name: str
    unit: str
    common: int
    steps: tuple[int, ...]
    first: tuple[float | None, ...]
    second: tuple[float | None, ...]
    medians: tuple[float | None, float | None]
    last: tuple[float | None, float | None]
    ratio: float | None
    first_difference: int | None


@dataclass(frozen=True)
class ParameterShift:
    """Medians of one parameter over the common steps; ``ratio`` is second over first."""

    column: str
    parameter: str
    first: float
    second: float
    ratio: float


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs; ``verdict`` states in one line whether they can be compared, and if not why.

    Without ``comparable`` there are no tracks. ``times`` is None where neither run has phase times, ``kinds``
    (by kind of operation) where one of them has no traced profile.
    """

    first: Side
    second: Side
    comparable: bool
    verdict: str
    factor: str | None
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    tracks: tuple[Track, ...] = ()
    parameters: tuple[ParameterShift, ...] = ()
    times: TimeComparison | None = None
    kinds: TimeComparison | None = None


def compare(run_a: Run, run_b: Run, factor: str | None = None) -> Comparison:
    """Compare two runs whose fingerprints agree except for ``factor``.

    That is one argument or field: ``--lr``, ``training.lr``, ``device``, ``versions.torch``. Where anything
    else differs, nothing is compared: a difference between different configurations is not evidence.
    """
    sides = _side(run_a), _side(run_b)
    prints = run_a.fingerprint(), run_b.fingerprint()
    notes = [
        f"the {order} run has no fingerprint, so that comparability is not known"
        for order, known in zip(("first", "second"), prints, strict=True)
        if known is None
    ]
    if prints[0] is None or prints[1] is None:
        return Comparison(*sides, False, f"not comparable: {', '.join(notes)}", factor, (), tuple(notes))
    found = assign_roles([*differences(prints[0], prints[1]), *_rates(run_a, run_b)], factor)
    obstacles = [d.text for d in found if d.role is Role.OBSTACLE]
    factors = [d.text for d in found if d.role is Role.FACTOR]
    notes += _factor_notes(found, factor)
    notes += [
        f"the {order} run has {run.attempts[-1].index + 1} attempts; the fingerprint is of the last"
        for order, run in (("first", run_a), ("second", run_b))
        if len(run.attempts) > 1
    ]
    if obstacles:
        verdict = f"not comparable: {', '.join(obstacles)}"
        return Comparison(*sides, False, verdict, factor, tuple(found), tuple(notes))
    verdict = f"comparable: they differ in {', '.join(factors)}" if factors else "comparable: no differences"
    tracks = tuple(filter(None, _tracks(run_a, run_b)))
    times = _times(run_a, run_b, found)
    notes += _effect_notes(found, tracks, times)
    shifts = tuple(_shifts(run_a, run_b))
    kinds = compare_kinds(run_a, run_b) if times is not None and times.rows else None
    return Comparison(*sides, True, verdict, factor, tuple(found), tuple(notes), tracks, shifts, times, kinds)


def _times(a: Run, b: Run, found: list[Difference]) -> TimeComparison | None:
    """Compare step times; on two machines only losses can be compared."""
    if not any(name.startswith("phase/") for run in (a, b) for name in run.scalar_names("backlight")):
        return None
    hosts = [d for d in found if d.field == "host" and d.role is not Role.FACTOR]
    if hosts:
        return TimeComparison((0, 0), (), RUN_CONFIDENCE, (hosts[0].text,))
    return compare_times(a, b, groups_of_repeats(a, b))


def _side(run: Run) -> Side:
    loss, clip = run.scalar("loss"), run.scalar("clip/factor")
    return Side(
        name=run.name,
        path=str(Path(run.path)),
        status=str(run.status.value),
        attempts=len(run.attempts),
        steps=run.last_step() + 1,
        last_loss=_number(loss.values[-1]) if len(loss.values) else None,
        clipped_share=float(np.mean(clip.values < 1)) if len(clip.values) else None,
    )


def _rates(a: Run, b: Run) -> list[Difference]:
    """Compare recorded learning rates, which a script may change without an argument."""
    found = []
    names = [n for n in a.scalar_names("backlight") if n.startswith("lr/")]
    for name in names:
        common, first, second = _common(a.scalar(name), b.scalar(name))
        differing = np.flatnonzero(~np.isclose(first, second, rtol=1e-6, atol=0.0))
        if len(differing):
            i = int(differing[0])
            text = f"learning rate {name} {first[i]:g} against {second[i]:g} at step {int(common[i])}"
            found.append(Difference(f"lr.{name}", text))
    return found


def _factor_notes(found: list[Difference], factor: str | None) -> list[str]:
    if factor is None:
        return []
    if not any(d.role is Role.FACTOR for d in found):
        return [f"the factor {factor!r} is the same in both runs, or neither of them has it"]
    following = [d.text for d in found if d.role is Role.CONSEQUENCE]
    if not following:
        return []
    return [f"assumed to follow from {factor!r}, since all else agrees: {', '.join(following)}"]


def _effect_notes(
    found: list[Difference], tracks: tuple[Track, ...], times: TimeComparison | None
) -> list[str]:
    """Report that nothing differs, which for a factor means that it had no effect."""
    compared = [t for t in tracks if t.name in {"loss", "total_norm"} and t.common]
    if not compared:
        return ["the runs share no recorded step of loss or total norm"]
    if any(t.first_difference is not None for t in compared):
        return []
    names = " and ".join(t.name for t in compared)
    verb = "is" if len(compared) == 1 else "are"
    same = f"{names} {verb} identical at all {compared[0].common} common steps"
    factors = [d.field.partition(".")[2] or d.field for d in found if d.role is Role.FACTOR]
    if times is not None and any(row.found for row in times.rows):
        return [same]  # they compute the same in different times
    timed = "" if times is None or not times.rows else ", and no difference in step time was found"
    return [f"{', '.join(factors)} had no effect: {same}{timed}" if factors else f"{same}{timed}"]


def _tracks(a: Run, b: Run) -> Iterable[Track | None]:
    for name in ("loss", "total_norm"):
        yield _track(name, a.scalar(name), b.scalar(name))
    yield _track("health", *(Scalar(s.steps, s.score, "1") for s in map(health_series, (a, b))))
    yield _track("clip/factor", a.scalar("clip/factor"), b.scalar("clip/factor"))
    theirs = set(b.scalar_names("user"))
    for name in (name for name in a.scalar_names("user") if name in theirs):
        yield _track(f"user/{name}", a.scalar(name, "user"), b.scalar(name, "user"))


def _track(name: str, one: Scalar, other: Scalar) -> Track | None:
    """Return the track of two scalars; None where neither run has it."""
    if len(one.steps) == 0 and len(other.steps) == 0:
        return None
    common, first, second = _common(one, other)
    shown = np.unique(np.linspace(0, max(len(common) - 1, 0), MAX_POINTS).round().astype(int))[: len(common)]
    both = np.isfinite(first) & np.isfinite(second)
    medians = (_median(first[both]), _median(second[both]))
    differing = np.flatnonzero(~((first == second) | (np.isnan(first) & np.isnan(second))))
    return Track(
        name=name,
        unit=one.unit,
        common=len(common),
        steps=tuple(common[shown].tolist()),
        first=tuple(map(_number, first[shown])),
        second=tuple(map(_number, second[shown])),
        medians=medians,
        last=(_number(first[-1]), _number(second[-1])) if len(common) else (None, None),
        ratio=_ratio(medians),
        first_difference=int(common[differing[0]]) if len(differing) else None,
    )


def _shifts(a: Run, b: Run) -> Iterable[ParameterShift]:
    """Return the parameters of one name and shape whose medians differ most, per column."""
    shapes = {p.name: p.shape for p in b.parameters()}
    same_shape = {p.name for p in a.parameters() if shapes.get(p.name) == p.shape}
    for series, column in COLUMNS:
        if not (a.has(series) and b.has(series)):
            continue
        one, other = a.frame(series, column), b.frame(series, column)
        _, rows_a, rows_b = np.intersect1d(one.steps, other.steps, return_indices=True)
        column_of = {name: j for j, name in enumerate(other.names) if name in same_shape}
        found = []
        for i, j in ((i, column_of[name]) for i, name in enumerate(one.names) if name in column_of):
            first = _median(one.values[rows_a, i][one.measured[rows_a, i]])
            second = _median(other.values[rows_b, j][other.measured[rows_b, j]])
            ratio = _ratio((first, second))
            if first is not None and second is not None and ratio:
                found.append(ParameterShift(f"{series}/{column}", one.names[i], first, second, ratio))
        yield from sorted(found, key=lambda shift: -abs(math.log(shift.ratio)))[:MAX_PARAMETERS]


def _common(one: Scalar, other: Scalar) -> tuple[NDArray[np.int64], Any, Any]:
    steps, rows_a, rows_b = np.intersect1d(one.steps, other.steps, return_indices=True)
    return steps, one.values[rows_a], other.values[rows_b]


def _median(values: NDArray[np.float64]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _ratio(medians: tuple[float | None, float | None]) -> float | None:
    first, second = medians
    return None if first is None or second is None or first == 0 else second / first


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
