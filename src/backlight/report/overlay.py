"""Several runs, overlaid as one page: a chart for each measure, a line for each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from backlight import __version__
from backlight.answer import Answer, Table
from backlight.findings.losses import losses_of
from backlight.report.charts import Axis, Line, chart, clipped_top, constant, spans_decades
from backlight.report.markdown import answer_markdown
from backlight.report.page import document, write_page
from backlight.report.panel import error_text, not_drawn, table_data
from backlight.report.source import Series, Source, rate_labels
from backlight.store.read.run import Run
from backlight.text import count, listed, number, visible

SHOWN = 8
"""Runs that one chart can tell apart."""


def compared(
    name: str,
    runs: int,
    detail: str,
    headline: str = "",
    steps: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Return what a page of several runs shows next to its panels; ``steps`` are the first and the last."""
    unlike = "" if headline else " A difference between unlike runs is not a difference."
    return {
        "steps": steps,
        "run": {"name": visible(name), "status": "compared"},
        "verdict": {
            "tone": "info",
            "headline": visible(headline) or f"{count(runs, 'run')} overlaid",
            "detail": f"{visible(detail)}{unlike}",
            "status": "",
            "about": [],
            "lines": [],
            "losses": [],
            "lead": None,
            "unmeasured": [],
            "figures": [],
        },
        "findings": [],
        "hints": [],
        "pages": {},
        "attempts": [],
        "parameters": [],
        "reasons": {},
        "precision": "0 %",
        "version": __version__,
    }


def part(
    name: str,
    title: str,
    kind: str,
    data: Mapping[str, Any],
    remarks: Sequence[str] = (),
    *,
    place: str = "full",
) -> dict[str, Any]:
    """Return a panel of a page of several runs, for the drawer ``kind``."""
    named = {"name": name, "title": title, "note": "", "place": place, "kind": kind}
    return {**named, "facts": [], "remarks": list(remarks), "data": dict(data)}


def write_answer(answer: Answer, title: str, target: Path) -> Path:
    """Write an answer as a page or as Markdown, by the suffix of ``target``; ValueError for another one."""
    if target.suffix == ".md":
        return write_page(answer_markdown(answer, title), target)
    if target.suffix != ".html":
        got = repr(target.suffix) if target.suffix else "no suffix"
        raise ValueError(f"{target}: expected a file that ends in .html or .md, got {got}")
    tables = [
        listing(table, name=f"table_{number}", remarks=table.notes)
        for number, table in enumerate(answer.tables)
    ]
    state = compared(title, 1, " ".join(f"{fact}." for fact in answer.facts), headline=answer.verdict)
    state["run"]["status"] = "analysed"
    state["verdict"]["about"] = [visible(note) for note in answer.notes]
    return write_page(document({**state, "panels": tables}, visible(title)), target)


def stated_part(name: str, title: str, text: str) -> dict[str, Any]:
    """Return a panel of a page of several runs that is one line of text."""
    return {"name": name, "title": title, "note": "", "place": "full", "stated": visible(text)}


def listing(
    table: Table, *, name: str = "", remarks: Sequence[str] = (), place: str = "full"
) -> dict[str, Any]:
    """Return a table as a panel of a page of several runs."""
    data = table_data(table)
    title = data.pop("title")
    shown = [visible(remark) for remark in remarks]
    name = name or title.lower().replace(" ", "_")
    return part(name, title, "listing", {"name": title, **data}, shown, place=place)


def left_out(runs: int) -> list[str]:
    """Return the sentence on runs that the charts leave out, if there are any."""
    return [f"The first {SHOWN} runs are drawn in each chart."] if runs > SHOWN else []


def curve_panels(sources: Sequence[tuple[str, Source]]) -> Iterator[dict[str, Any]]:
    """Yield the panels of runs, given with their names; what fails is named in its place, the rest stays."""
    for name, (title, curves, axis) in CHARTS.items():
        lines: dict[str, list[Line]] = {}
        failed = []
        for run, source in sources[:SHOWN]:
            try:
                for curve, (steps, values) in curves(source).items():
                    if len(steps):
                        lines.setdefault(curve, []).append(Line(run, steps, values))
            except Exception as error:  # noqa: BLE001 - one run must not take the others with it
                failed.append(f"{run}: {error_text(error).rstrip('.')}")
        remarks = []
        if name == "health":
            remarks = [f"{run}: {source.untrained_text}." for run, source in sources if source.untrained]
        if lines and not failed and all(constant(line.values) is not None for line in chain(*lines.values())):
            yield stated_part(name, title, " ".join([_values(lines), *remarks]))
            continue
        cold = frozenset[int]().union(*(source.cold_steps for _, source in sources[:SHOWN]))
        charts = []
        for curve, of_runs in sorted(lines.items()):
            try:
                drawn = axis(curve, of_runs, cold)
                charts.append(chart(of_runs, drawn, title=visible(curve), adjustable=name == "loss"))
            except Exception as error:  # noqa: BLE001 - one chart must not take the others with it
                failed.append(error_text(error).rstrip("."))
        problems = "; ".join(failed)
        if charts:
            data = {"charts": charts, "small": name == "logged" and len(charts) > 1}
            place = "half" if len(charts) == 1 else "full"
            remarks = [*([f"Not drawn: {problems}."] if problems else []), *remarks]
            yield part(name, title, "lines", data, remarks, place=place)
        elif problems:
            yield part(name, title, "failed", {"reason": not_drawn(name, problems)})


def _values(lines: Mapping[str, Sequence[Line]]) -> str:
    """Return in words the one value of each line."""
    texts = []
    for curve, of_runs in sorted(lines.items()):
        values = {line.label: number(float(line.values[0])) for line in of_runs}
        same = len(set(values.values())) == 1 and len(values) > 1
        shown = (
            f"{next(iter(values.values()))} in each run"
            if same
            else listed([f"{value} in {run}" for run, value in values.items()], SHOWN)
        )
        texts.append(f"{visible(curve)}: {shown}" if curve else shown)
    return "; ".join(texts) + ", at every recorded step."


Curves = Callable[[Source], dict[str, Series]]
"""What is drawn of one run, by the title of its chart."""


def _unlabelled(name: str) -> Curves:
    return lambda source: {"": _scalar(source, name)}


def _losses(source: Source) -> dict[str, Series]:
    losses = losses_of(source.run)
    return {
        "" if label == "loss" else label: (series.steps, series.values) for label, series in losses.items()
    }


def _health(source: Source) -> dict[str, Series]:
    return {} if source.health is None else {"": source.health}


def _logged(source: Source) -> dict[str, Series]:
    return {name: _scalar(source, name, "user") for name in source.run.scalar_names("user")}


def median_updates(run: Run) -> Series:
    """Return the median over parameters of update over weight, by recorded step; NaN where none was."""
    if not run.has("update"):
        return np.empty(0, np.int64), np.empty(0)
    frame = run.frame("update", "ratio")
    values = np.where(frame.measured & np.isfinite(frame.values), frame.values, np.nan)
    rows = ~np.isnan(values).all(axis=1)
    return frame.steps[rows], np.nanmedian(values[rows], axis=1)


def _updates(source: Source) -> dict[str, Series]:
    return {"": median_updates(source.run)}


def _times(source: Source) -> dict[str, Series]:
    phases = [source.scalar(name) for name in source.scalar_names("phase")]
    if not phases:
        return {}
    steps = np.unique(np.concatenate([scalar.steps for scalar in phases]))
    return {"": (steps, 1e3 * source.step_times)}


def _rates(source: Source) -> dict[str, Series]:
    labels = rate_labels(source.run, source.scalar_names("lr"))
    return {label if len(labels) > 1 else "": _scalar(source, name) for name, label in labels.items()}


AxisOf = Callable[[str, Sequence[Line], frozenset[int]], Axis]
"""Return the axis of a chart by its title, its lines and the cold steps of the runs."""


def _scaled(label: str) -> AxisOf:
    return lambda _, lines, _cold: Axis(
        label, log=spans_decades(*(line.values for line in lines), factor=30.0)
    )


def _fixed(label: str, high: float | None = None, low: float | None = 0.0) -> AxisOf:
    return lambda _title, _lines, _cold: Axis(label, low=low, high=high)


def _of_times(_title: str, lines: Sequence[Line], cold: frozenset[int]) -> Axis:
    steps = np.concatenate([line.steps for line in lines])
    values = np.concatenate([line.values for line in lines])
    return Axis("time (ms)", low=0.0, top=clipped_top(steps, values, cold))


def _of_logged(title: str, _lines: Sequence[Line], _cold: frozenset[int]) -> Axis:
    return Axis("share of samples", low=0.0, high=1.0) if title.endswith("accuracy") else Axis("")


CHARTS: dict[str, tuple[str, Curves, AxisOf]] = {
    "loss": ("Loss", _losses, _scaled("")),
    "total_norm": ("Gradient norm", _unlabelled("total_norm"), _scaled("L2 norm")),
    "updates": ("Update to weight", _updates, _scaled("median over parameters")),
    "learning_rates": ("Learning rate", _rates, _fixed("learning rate", low=None)),
    "times": ("Time of a step", _times, _of_times),
    "health": ("Health", _health, _fixed("health (0 to 1)", 1.0)),
    "logged": ("What you logged", _logged, _of_logged),
}
"""Panels by name: their titles, their curves, and the axis of a chart."""


def _scalar(source: Source, name: str, of: str = "backlight") -> Series:
    scalar = source.scalar(name, source=of)
    return scalar.steps, scalar.values
