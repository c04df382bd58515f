"""Two runs side by side, or the reasons why their difference would mean nothing. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.analysis.fingerprint_diff import Difference, Role, differences, judged
from backlight.analysis.op_times import compare_kinds
from backlight.monitors.health.model.score import health_series
from backlight.monitors.steptime.model.step_comparison import TimeComparison, compare_times
from backlight.monitors.steptime.model.step_times import CONFIDENCE
from backlight.store.read.run import Run, Scalar

POINTS = 256
"""Common steps that a track carries, evenly spread; its numbers are of all of them."""

PARAMETERS_SHOWN = 10
"""Parameters whose medians differ most, per column."""

COLUMNS = (("gradient", "rms"), ("update", "ratio"))
"""Per-parameter columns whose medians over the common steps are compared."""


@dataclass(frozen=True)
class Side:
    """One of the two runs by itself: its numbers are shown even where a comparison would mean nothing."""

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

    ``ratio`` is the second median over the first. ``parted`` is the first common step at which the values
    differ at all, None where they are identical.
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
    parted: int | None


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
    """What two runs share and where they differ; without ``comparable`` there are no tracks at all.

    ``verdict`` says in one line whether they can be compared, and if not why. ``times`` is None where the
    runs are not comparable or neither of them has phase times, ``kinds`` (by kind of operation) where one of
    them is no traced profile.
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
    """Compare two runs whose fingerprints agree but for ``factor``.

    Parameters
    ----------
    run_a, run_b:
        Stored runs.
    factor:
        The one argument or field that may differ: ``--lr``, ``training.lr``, ``device``, ``versions.torch``.

    Returns
    -------
    The comparison. Where anything else differs it is not ``comparable`` and holds no tracks: a difference
    between unlike runs is not a difference.
    """
    sides = _side(run_a), _side(run_b)
    prints = run_a.fingerprint(), run_b.fingerprint()
    notes = [
        f"the {place} run has no fingerprint, so that nothing is known of its likeness"
        for place, known in zip(("first", "second"), prints, strict=True)
        if known is None
    ]
    if prints[0] is None or prints[1] is None:
        return Comparison(*sides, False, f"not comparable: {', '.join(notes)}", factor, (), tuple(notes))
    found = differences(prints[0], prints[1])
    found += _rates(run_a, run_b)
    found = judged(found, factor)
    obstacles = [d.words for d in found if d.role is Role.OBSTACLE]
    factors = [d.words for d in found if d.role is Role.FACTOR]
    notes += _factor_notes(found, factor)
    notes += [
        f"the {place} run has {run.attempts[-1].index + 1} attempts; the fingerprint is of the last"
        for place, run in (("first", run_a), ("second", run_b))
        if len(run.attempts) > 1
    ]
    if obstacles:
        verdict = f"not comparable: {', '.join(obstacles)}"
        return Comparison(*sides, False, verdict, factor, tuple(found), tuple(notes))
    verdict = f"comparable: they differ in {', '.join(factors)}" if factors else "comparable: all agrees"
    tracks = tuple(_tracks(run_a, run_b))
    times = _times(run_a, run_b, found)
    notes += _effect_notes(found, tracks, times)
    shifts = tuple(_shifts(run_a, run_b))
    kinds = compare_kinds(run_a, run_b) if times is not None and times.rows else None
    return Comparison(*sides, True, verdict, factor, tuple(found), tuple(notes), tracks, shifts, times, kinds)


def _times(a: Run, b: Run, found: list[Difference]) -> TimeComparison | None:
    """Compare step times; two machines are two speeds, though their losses may be compared."""
    if not any(name.startswith("phase/") for run in (a, b) for name in run.scalar_names("backlight")):
        return None
    hosts = [d for d in found if d.field == "host" and d.role is not Role.FACTOR]
    if hosts:
        return TimeComparison((0, 0), (), CONFIDENCE, (hosts[0].words,))
    return compare_times(a, b)


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
    """Compare recorded learning rates: a script may have changed them without an argument."""
    found = []
    names = [n for n in a.scalar_names("backlight") if n.startswith("lr/")]
    for name in names:
        common, first, second = _common(a.scalar(name), b.scalar(name))
        apart = np.flatnonzero(~np.isclose(first, second, rtol=1e-6, atol=0.0))
        if len(apart):
            i = int(apart[0])
            words = f"learning rate {name} {first[i]:g} against {second[i]:g} at step {int(common[i])}"
            found.append(Difference(f"lr.{name}", words))
    return found


def _factor_notes(found: list[Difference], factor: str | None) -> list[str]:
    if factor is None:
        return []
    if not any(d.role is Role.FACTOR for d in found):
        return [f"the factor {factor!r} is the same in both runs, or neither of them has it"]
    following = [d.words for d in found if d.role is Role.CONSEQUENCE]
    if not following:
        return []
    return [f"taken to follow from {factor!r}, since all else agrees: {', '.join(following)}"]


def _effect_notes(
    found: list[Difference], tracks: tuple[Track, ...], times: TimeComparison | None
) -> list[str]:
    """Say so where nothing moved, which for a factor means that it had no effect."""
    told = [t for t in tracks if t.name in {"loss", "total_norm"} and t.common]
    if not told:
        return ["the runs share no recorded step of loss or total norm"]
    if any(t.parted is not None for t in told):
        return []
    verb = "is" if len(told) == 1 else "are"
    same = f"{' and '.join(t.name for t in told)} {verb} identical at all {told[0].common} common steps"
    factors = [d.field.partition(".")[2] or d.field for d in found if d.role is Role.FACTOR]
    moved = times is not None and any(row.found for row in times.rows)
    if moved:
        return [same]  # what they compute is the same, how long it takes is not
    timed = "" if times is None or not times.rows else ", and no difference in step time was found"
    return [f"{', '.join(factors)} had no effect: {same}{timed}" if factors else f"{same}{timed}"]


def _tracks(a: Run, b: Run) -> Iterable[Track]:
    for name in ("loss", "total_norm"):
        yield from _track(name, a.scalar(name), b.scalar(name))
    scores = [health_series(run) for run in (a, b)]
    yield from _track("health", *(Scalar(s.steps, s.score, "1") for s in scores))
    yield from _track("clip/factor", a.scalar("clip/factor"), b.scalar("clip/factor"))
    theirs = set(b.scalar_names("user"))
    for name in a.scalar_names("user"):
        if name in theirs:
            yield from _track(f"user/{name}", a.scalar(name, "user"), b.scalar(name, "user"))


def _track(name: str, one: Scalar, other: Scalar) -> list[Track]:
    """Lay two scalars side by side; nothing where neither run has it."""
    if len(one.steps) == 0 and len(other.steps) == 0:
        return []
    common, first, second = _common(one, other)
    shown = np.unique(np.linspace(0, max(len(common) - 1, 0), POINTS).round().astype(int))[: len(common)]
    both = np.isfinite(first) & np.isfinite(second)
    medians = (_median(first[both]), _median(second[both]))
    apart = np.flatnonzero(~((first == second) | (np.isnan(first) & np.isnan(second))))
    return [
        Track(
            name=name,
            unit=one.unit,
            common=len(common),
            steps=tuple(int(common[i]) for i in shown),
            first=tuple(_number(first[i]) for i in shown),
            second=tuple(_number(second[i]) for i in shown),
            medians=medians,
            last=(_number(first[-1]), _number(second[-1])) if len(common) else (None, None),
            ratio=_ratio(medians),
            parted=int(common[apart[0]]) if len(apart) else None,
        )
    ]


def _shifts(a: Run, b: Run) -> Iterable[ParameterShift]:
    """Return the parameters of one name and shape whose medians differ most, per column."""
    shapes = {p.name: p.shape for p in b.parameters()}
    alike = {p.name for p in a.parameters() if shapes.get(p.name) == p.shape}
    for series, column in COLUMNS:
        if not (a.has(series) and b.has(series)):
            continue
        one, other = a.frame(series, column), b.frame(series, column)
        _, rows_a, rows_b = np.intersect1d(one.steps, other.steps, return_indices=True)
        place = {name: i for i, name in enumerate(other.names)}
        found = []
        for i, name in enumerate(one.names):
            if name in alike and name in place:
                first = _median(one.values[rows_a, i][one.measured[rows_a, i]])
                second = _median(other.values[rows_b, place[name]][other.measured[rows_b, place[name]]])
                ratio = _ratio((first, second))
                if first is not None and second is not None and ratio:
                    found.append(ParameterShift(f"{series}/{column}", name, first, second, ratio))
        yield from sorted(found, key=lambda shift: -abs(math.log(shift.ratio)))[:PARAMETERS_SHOWN]


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
