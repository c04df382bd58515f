"""Send a stored run to a tracker: the points that a live run would have sent, joined over ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backlight.findings.evaluate import findings_of, separate_hints
from backlight.records import RunStatus
from backlight.session.trackers.base import Point, Tracked, TrackerError, chosen
from backlight.session.trackers.metrics import Naming, is_split
from backlight.store.read.run import Run

POINTS = 1000
"""Points that a tracker is given at a time."""


@dataclass(frozen=True)
class Sent:
    """Counts of what was sent to a tracker."""

    tracker: str
    target: str
    steps: int
    findings: int


def send(run: Run, given: str) -> Sent:
    """Send a stored run to the tracker ``given``, ``NAME`` or ``NAME=TARGET``, and wait until it has it."""
    tracker, target = chosen(given)
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
        raise TrackerError(f"the tracker {given!r} failed: {type(error).__name__}: {lines[0]}") from error
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
        own = {
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
        shown = own.pop("step", None)
        values |= {f"user/{name}": value for name, value in own.items()}
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


def send_all(run: Run, given: Sequence[str]) -> list[Sent]:
    """Send a run to each of several trackers; what cannot be had is refused before anything is sent.

    Raises ValueError, as :func:`send` does.
    """
    for name in given:
        chosen(name)
    return [send(run, name) for name in given]
