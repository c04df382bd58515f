"""Measures of several runs, overlaid by step or relative to t_generalise. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight import codec
from backlight.answer import Answer, Column, Table, indexed, word
from backlight.monitors.grokking.model.analysis import limits_of
from backlight.monitors.grokking.model.curves import DetectionError
from backlight.monitors.grokking.model.lead_lag import measures_of
from backlight.monitors.grokking.model.reader import TEST, TRAIN, Stated, detect_run, stated
from backlight.monitors.grokking.model.verdicts import Detection
from backlight.report.charts import Axis, Line, chart, spans_decades
from backlight.report.overlay import SHOWN, compared, left_out, listing, part
from backlight.report.page import document, write_page
from backlight.store.read.run import Run
from backlight.text import count, number, visible

CURVES = (TRAIN, TEST, "train_loss", "test_loss")
"""Curves of the user that come before the measures."""

TABLE_STEPS = 5
"""Steps at which a table shows a measure."""

Series = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True)
class Overlaid:
    """Several overlaid runs; ``left_out`` could not be aligned.

    ``runs`` are path, what the run states and its verdict (None for ``reasons``). ``measures`` are by measure
    and run name: steps [S], counted from t_generalise where ``aligned``, and values [S].
    """

    runs: Mapping[str, tuple[Path, Stated, Detection | None]]
    reasons: Mapping[str, str]
    measures: Mapping[str, Mapping[str, Series]]
    aligned: bool
    left_out: tuple[str, ...] = ()

    def table_steps(self) -> list[int]:
        """Return steps for a table, spread over the common range; 0 is among them where aligned."""
        spans = [
            (int(steps[0]), int(steps[-1]))
            for of_run in self.measures.values()
            for steps, _ in of_run.values()
            if len(steps)
        ]
        if not spans:
            return []
        low, high = max(s[0] for s in spans), min(s[1] for s in spans)
        if low > high:
            low, high = min(s[0] for s in spans), max(s[1] for s in spans)
        if self.aligned and low < 0 < high:
            return [low, low // 2, 0, high // 2, high]
        return [round(float(step)) for step in np.linspace(low, high, TABLE_STEPS)]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "aligned": self.aligned,
            "left_out": list(self.left_out),
            "runs": {
                name: {
                    "run": str(path),
                    "facts": codec.plain(facts),
                    "verdict": codec.plain(detection) if detection else None,
                    "reason": self.reasons.get(name),
                }
                for name, (path, facts, detection) in self.runs.items()
            },
            "measures": {
                measure: {
                    name: {"steps": steps.tolist(), "values": values.tolist()}
                    for name, (steps, values) in of_run.items()
                }
                for measure, of_run in self.measures.items()
            },
        }


def overlay(runs: Sequence[Run], *, align: bool = False, only: Sequence[str] = ()) -> Overlaid:
    """Overlay the measures of two or more runs, by step or, with ``align``, relative to t_generalise."""
    if len(runs) < 2:
        raise ValueError(f"got {len(runs)} run; a comparison needs at least two")
    named = _named(runs)
    reasons: dict[str, str] = {}
    detections: dict[str, tuple[Path, Stated, Detection | None]] = {}
    for name, run in named.items():
        try:
            detection: Detection | None = detect_run(run, limits_of(run))
        except DetectionError as error:
            detection, reasons[name] = None, str(error)
        detections[name] = (run.path, stated(run), detection)
    left_out = []
    measures: dict[str, dict[str, Series]] = {}
    for name, run in named.items():
        detection = detections[name][2]
        if align and (detection is None or detection.generalised is None):
            left_out.append(name)
            continue
        shift = detection.generalised.by if align and detection and detection.generalised else 0
        for measure, scalar in _series(run).items():
            if not only or measure.startswith(tuple(only)):
                measures.setdefault(measure, {})[name] = (scalar[0] - shift, scalar[1])
    if align and len(left_out) == len(named):
        raise ValueError("none of the runs generalised, so that there is nothing to align; leave out --align")
    if not measures:
        asked = f" that begins with {', '.join(only)}" if only else ""
        measured = ", ".join(sorted({m for run in runs for m in _series(run)})[:12]) or "none"
        raise ValueError(f"none of the runs has a measure{asked}; there are: {measured}")
    return Overlaid(detections, reasons, measures, align, tuple(left_out))


def _series(run: Run) -> dict[str, Series]:
    logged = set(run.scalar_names("user"))
    curves = {name: run.scalar(name, source="user") for name in CURVES if name in logged}
    return {name: (s.steps, s.values) for name, s in {**curves, **measures_of(run)}.items()}


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by directory name, numbered where two share one."""
    named: dict[str, Run] = {}
    for run in runs:
        folder = run.path.resolve().name
        name, copy = folder, 2
        while name in named:
            name, copy = f"{folder} ({copy})", copy + 1
        named[name] = run
    return named


def value_at(series: Series, step: int) -> float | None:
    """Return the value logged last at or before ``step``; None outside of the logged steps."""
    steps, values = series
    if not len(steps) or step < steps[0] or step > steps[-1]:
        return None
    value = float(values[int(np.searchsorted(steps, step, side="right")) - 1])
    return value if math.isfinite(value) else None


def answer(overlaid: Overlaid) -> Answer:
    """Return the runs with their verdicts, then each measure at a few steps, run by run."""
    steps = overlaid.table_steps()[::2]  # as many as fit next to the names in 80 columns
    heads = [f"{step:+,}" if overlaid.aligned else f"step {step:,}" for step in steps]
    values = (
        Column(head, partial(_value_of, step), lambda value: number(value, 3))
        for head, step in zip(heads, steps, strict=True)
    )
    measures = Table(
        (word("measure", itemgetter(0)), word("run", itemgetter(1), "name"), *values),
        [
            ("" if row else measure, name, series)
            for measure, of_run in overlaid.measures.items()
            for row, (name, series) in enumerate(of_run.items())
        ],
        brief=200,
        notes=("steps count from the generalisation of each run",) if overlaid.aligned else (),
    )
    verdict = f"{count(len(overlaid.runs), 'run')} overlaid"
    return Answer(verdict, overlaid.as_json(), _remarks(overlaid), (_runs_table(overlaid), measures))


def _value_of(step: int, row: tuple[str, str, Series]) -> float | None:
    return value_at(row[2], step)


def _runs_table(overlaid: Overlaid) -> Table:
    rows = []
    for name, (_, facts, detection) in overlaid.runs.items():
        times = ("not evaluated", "", "")
        if detection is not None:
            times = (detection.words, str(detection.memorised or ""), str(detection.generalised or ""))
        rows.append((name, facts.experiment, facts.control, *times))
    heads = ("run", "experiment", "control", "verdict", "memorised in", "generalised in")
    return Table(indexed(heads, "text"), rows, brief=60, title="Runs")


def _remarks(overlaid: Overlaid) -> tuple[str, ...]:
    alone = (f"{name} never generalised and cannot be aligned." for name in overlaid.left_out)
    return (*alone, *(f"{reason}." for reason in overlaid.reasons.values()))


def write_overlay(overlaid: Overlaid, target: Path) -> Path:
    """Write the page of overlaid runs to ``target``, a chart for each measure, and return its path."""
    across = "steps after generalisation" if overlaid.aligned else "step"
    most = max((len(of_run) for of_run in overlaid.measures.values()), default=0)
    panels = [listing(_runs_table(overlaid), remarks=(*_remarks(overlaid), *left_out(most)))]
    for title in ("Learning curves", "Progress measures", "Geometry of gradients"):
        chosen = {name: of_run for name, of_run in overlaid.measures.items() if _kind(name) == title}
        charts = [drawn for name in chosen if (drawn := _chart(name, chosen[name], across)) is not None]
        if charts:
            panels.append(part(title.split(maxsplit=1)[0].lower(), title, "lines", {"charts": charts}))
    every = [steps for of_run in overlaid.measures.values() for steps, _ in of_run.values() if len(steps)]
    ends = (min(int(s[0]) for s in every), max(int(s[-1]) for s in every)) if every else (0, 0)
    state = compared("Overlaid runs", len(overlaid.runs), f"By {across}.", steps=ends)
    return write_page(document({**state, "across": across, "panels": panels}, "Overlaid runs"), target)


def _chart(name: str, of_run: Mapping[str, Series], across: str) -> dict[str, Any] | None:
    lines = [
        Line(visible(run), steps, values)
        for run, (steps, values) in list(of_run.items())[:SHOWN]
        if len(steps)
    ]
    if not lines:
        return None
    axis = Axis("", log=spans_decades(*(line.values for line in lines), factor=30.0))
    if name.endswith("_accuracy"):
        axis = Axis("share of samples", low=0.0, high=1.0)
    return chart(lines, axis, title=visible(name), across=across)


def _kind(name: str) -> str:
    if "/" not in name:
        return "Learning curves"
    return "Progress measures" if name.startswith("progress/") else "Geometry of gradients"
