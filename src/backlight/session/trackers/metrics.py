"""Numbers of a step under the names that trackers get, for a live run and a stored one.

=========================== =================================================================
``loss``                     sum of the losses given to backward in the step
``loss/<optimizer>``         those of one of several optimizers
``total_norm``               L2 norm of all gradients, before clipping
``lr/<optimizer>/<group>``   learning rates
``phase/<phase>``            seconds
``clip/...``, ``scaler/...`` what clipping and the loss scale did
``cost``                     seconds that backlight took
``norm/<group>``             L2 norm of a group's gradients
``ratio/<group>``            |update| / |weight| of a group
``update_ratio``             the same per parameter, as a histogram
``user/<name>``              what the user logged
=========================== =================================================================

Shapes: P parameters, in the order of their table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.findings.evaluate import findings_of, separate_hints
from backlight.monitors.health.model.parameters import GroupError, members
from backlight.records import Layout, ParameterRecord, RunStatus
from backlight.series import GRADIENT, UPDATE
from backlight.session.trackers.base import Point, Tracked, TrackerError, chosen
from backlight.store.read.run import Run

MOST_GROUPS = 32
"""Groups that are made of modules where the user named none."""

_LEFT_OUT = frozenset(("time", "batch", "backwards", "backwards_seen", "forwards", "addends"))

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def groups_of(names: Sequence[str], patterns: Mapping[str, str]) -> dict[str, Integers]:
    """Return the rows of each group: the user's groups, else the modules nearest to the root.

    Without patterns the modules of that depth are taken at which there is more than one, as long as they are
    at most :data:`MOST_GROUPS`; a pattern that matches nothing is left out; the fingerprint monitor reports
    it.
    """
    rows: dict[str, Integers] = {}
    place = {name: row for row, name in enumerate(names)}
    for group, pattern in patterns.items():
        try:
            rows[group] = np.array([place[name] for name in members(names, pattern)], dtype=np.int64)
        except GroupError:
            continue
    if patterns:
        return rows
    deepest = max((name.count(".") for name in names), default=0)
    for depth in range(1, deepest + 1):
        modules: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            modules.setdefault(".".join(name.split(".")[:-1][:depth]) or name, []).append(row)
        if len(modules) > MOST_GROUPS:
            break
        if len(modules) > 1 or depth == deepest:
            return {group: np.array(of, dtype=np.int64) for group, of in modules.items()}
    return rows


def is_split(records: Sequence[ParameterRecord]) -> bool:
    """Return whether a rank holds only a part of some parameter, so that its norms are not the whole's."""
    return any(r.placement.layout in {Layout.SHARD, Layout.PARTIAL} for r in records)


class Naming:
    """Makes points of one parameter table: what is constant from step to step is found once."""

    def __init__(self, names: Sequence[str], patterns: Mapping[str, str], *, split: bool = False) -> None:
        self._groups = groups_of(names, patterns)
        self._split = split

    def scalars(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return backlight's scalars of a step; those that a single shard cannot know are left out."""
        kept = {name: value for name, value in scalars.items() if name not in _LEFT_OUT}
        if self._split:
            kept.pop("total_norm", None)
        return kept

    def gradient(self, norm_P: Floats, measured_P: npt.NDArray[np.bool_]) -> dict[str, float]:
        """Return the norm of each group of which something was measured, from the norms of parameters."""
        if self._split:
            return {}
        return {
            f"norm/{group}": _root(norm_P[rows][measured_P[rows]])
            for group, rows in self._groups.items()
            if measured_P[rows].any()
        }

    def update(
        self, update_P: Floats, weight_P: Floats, measured_P: npt.NDArray[np.bool_]
    ) -> tuple[dict[str, float], dict[str, Floats]]:
        """Return update over weight of each group, and of all parameters whose weight is not zero."""
        if self._split:
            return {}, {}
        values: dict[str, float] = {}
        for group, rows in self._groups.items():
            seen = rows[measured_P[rows]]
            below = _root(weight_P[seen])
            if len(seen) and below:
                values[f"ratio/{group}"] = _root(update_P[seen]) / below
        some = measured_P & (weight_P > 0)
        ratios = update_P[some] / weight_P[some]
        ratios = ratios[np.isfinite(ratios)]
        return values, {"update_ratio": ratios} if len(ratios) else {}


def point_of_blobs(
    naming: Naming,
    step: int,
    scalars: Mapping[str, float],
    blobs: Mapping[tuple[str, int], tuple[Floats, Integers]],
) -> Point:
    """Return the point of a step that was just recorded, from what goes into the store."""
    values = naming.scalars(scalars)
    spreads: dict[str, Floats] = {}
    if ("gradient", 0) in blobs:
        floats, integers = blobs["gradient", 0]
        norm_P = floats[:, GRADIENT.floats.index("norm")]
        values |= naming.gradient(norm_P, integers[:, GRADIENT.integers.index("measured")] > 0)
    if ("update", 0) in blobs:
        floats, integers = blobs["update", 0]
        update_P, weight_P = (floats[:, UPDATE.floats.index(n)] for n in ("update_norm", "weight_norm"))
        more, spreads = naming.update(update_P, weight_P, integers[:, UPDATE.integers.index("measured")] > 0)
        values |= more
    return Point(step, float(scalars.get("time", math.nan)), values, spreads)


def _root(values: Floats) -> float:
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.sum(np.square(values))))


POINTS = 1000
"""Points that a tracker is given at a time."""


@dataclass(frozen=True)
class Sent:
    """Counts of what was sent to a tracker."""

    tracker: str
    target: str
    steps: int
    findings: int


def send(run: Run, option: str) -> Sent:
    """Send a stored run to the tracker ``option``, ``NAME`` or ``NAME=TARGET``, and wait until it has it."""
    tracker, target = chosen(option)
    # Read before anything is opened: a run that cannot be read leaves nothing behind.
    points = list(points_of(run))
    findings, _ = separate_hints(findings_of(run))
    try:
        sink = tracker.open(target, Tracked(run.name, run.path, live=False), None)
        for start in range(0, len(points), POINTS):
            sink.send(points[start : start + POINTS])
        sink.findings(findings, points[-1].step if points else 0)
        sink.close(failed=run.status in {RunStatus.FAILED, RunStatus.KILLED})
    except (TrackerError, ModuleNotFoundError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise TrackerError(f"the tracker {option!r} failed: {type(error).__name__}: {lines[0]}") from error
    return Sent(tracker.name, target, len(points), len(findings))


def points_of(run: Run) -> Iterator[Point]:
    """Yield one point for each recorded or logged step, in order; the user's own step numbers it."""
    scalars = {
        (source, name): _by_step(run.scalar(name, source))
        for source in ("backlight", "user")
        for name in run.scalar_names(source)
    }
    records = run.parameters()
    gradient = _Column(run, "gradient", "norm")
    update, weight = _Column(run, "update", "update_norm"), _Column(run, "update", "weight_norm")
    steps = {step for values in scalars.values() for step in values} | set(gradient.rows) | set(update.rows)
    naming = Naming([record.name for record in records], run.groups)
    split = is_split(records)
    time = run.attempts[0].started if run.attempts else 0.0
    for step in sorted(steps):
        logged = {
            n: values[step] for (source, n), values in scalars.items() if source == "user" and step in values
        }
        measured = {
            n: values[step] for (source, n), values in scalars.items() if source != "user" and step in values
        }
        values = naming.scalars(measured)
        spreads: dict[str, Any] = {}
        if step in gradient.rows:
            norm_P, measured_P = gradient.at(step)
            values |= naming.gradient(norm_P, measured_P)
            if split and measured_P.any():  # what one rank stored is the norm of its parts
                values["total_norm"] = float(np.sqrt(np.sum(np.square(norm_P[measured_P]))))
        if step in update.rows:
            more, spreads = naming.update(update.at(step)[0], *weight.at(step))
            values |= more
        time = measured.get("time", time)
        shown = logged.pop("step", None)
        values |= {f"user/{name}": value for name, value in logged.items()}
        yield Point(step if shown is None else int(shown), time, values, spreads)


class _Column:
    """A column of a series by step."""

    def __init__(self, run: Run, series: str, column: str) -> None:
        self._frame = run.frame(series, column)
        self.rows = {step: row for row, step in enumerate(self._frame.steps.tolist())}

    def at(self, step: int) -> tuple[Any, Any]:
        row = self.rows[step]
        return self._frame.values[row], self._frame.measured[row]


def _by_step(scalar: Any) -> dict[int, float]:
    return dict(zip(scalar.steps.tolist(), scalar.values.tolist(), strict=True))


def send_all(run: Run, options: Sequence[str]) -> list[Sent]:
    """Send a run to each of several trackers; what cannot be had is refused before anything is sent.

    Raises ValueError, as :func:`send` does.
    """
    for name in options:
        chosen(name)
    return [send(run, name) for name in options]
