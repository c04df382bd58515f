"""What panels of grokking share: the analysis of a run, lines of metrics and their control, marked times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.grokking.model.analysis import GrokkingAnalysis, analyse_if_possible
from backlight.monitors.grokking.model.curves import Interval
from backlight.monitors.grokking.model.verdicts import Detection
from backlight.report.charts import Axis, Line, Span, chart, spans_decades
from backlight.report.panel import Drawn, Fact, Figures, NotMeasured, Summary
from backlight.report.source import Source
from backlight.store.read.run import Run, Scalar
from backlight.text import count, number, visible

GEOMETRY = ("gram/", "window/", "agop/", "product/", "gradient/")
"""Beginnings of the scalars that describe the geometry of gradients."""

SCOPES = 8
"""Lines of single layers that one chart can tell apart."""

TONES = ("first", "fourth", "third", "fifth", "second", "sixth")
"""Tones of the metrics of one chart; a control has that of its metric, dashed."""


def _analysis(source: Source) -> GrokkingAnalysis | None:
    return analyse_if_possible(source.run) if "grokking" in source.run.monitors else None


def analysis_of(source: Source) -> GrokkingAnalysis | None:
    """Return the verdict on the run with its control; None where there is none."""
    return source.once(_analysis)


def verdict_of(detection: Detection) -> str:
    """Return the verdict in words."""
    return "grokking, strong" if detection.strong else detection.verdict.value


def spans(source: Source, *, named: bool = False) -> tuple[Span, ...]:
    """Return the two times as stretches of a chart, ``named`` in its legend as well."""
    found = analysis_of(source)
    if found is None:
        return ()
    times = (
        ("memorised", "t_m", found.detection.memorised, "second"),
        ("generalised", "t_g", found.detection.generalised, "third"),
    )
    return tuple(
        Span(f"{label} {between(time)}" if named else "", mark, time.after, time.by, tone)
        for label, mark, time, tone in times
        if time is not None
    )


def between(time: Interval | None) -> str:
    """Return an interval of steps in words: ``(20, 30]``."""
    return "not seen" if time is None else f"({number(time.after)}, {number(time.by)}]"


def summary(source: Source) -> Summary | None:
    """Return the summary of a run that was watched for grokking, and not for its gradients."""
    names = [n for n in source.run.scalar_names("backlight") if n.startswith(GEOMETRY)]
    if source.run.has("gradient") or not names:
        return None
    steps = np.unique(np.concatenate([source.scalar(name).steps for name in names]))
    return Summary(f"The geometry of gradients was measured at {count(len(steps), 'step')}.", _figures)


def _figures(source: Source) -> Figures:
    found = analysis_of(source)
    if found is None:
        return ()
    accuracy = source.scalar("test_accuracy", source="user")
    last = accuracy.values[-1:]
    theirs = found.control_detection
    control = verdict_of(theirs) if theirs else "is one" if found.facts.control else "not run"
    shown = number(float(last[0]), 3) if len(last) else "not measured"
    at = f"at step {number(int(accuracy.steps[-1]))}" if len(last) else ""
    return (
        ("verdict", verdict_of(found.detection), ""),
        ("memorised in steps", between(found.detection.memorised), ""),
        ("generalised in steps", between(found.detection.generalised), ""),
        ("last test accuracy", shown, at),
        ("control", control, "random labels" if theirs else ""),
    )


def measured(run: Run, name: str, source: str = "backlight") -> Scalar | None:
    """Return a scalar with at least one log, else None."""
    scalar = run.scalar(name, source=source)
    return scalar if len(scalar.steps) else None


def lines_of(source: Source, metrics: Sequence[tuple[str, str]], origin: str = "backlight") -> list[Line]:
    """Return a line for each metric (scalar, label) that was recorded, and a dashed one of the control's."""
    found = analysis_of(source)
    control = found.control if found else None
    lines = []
    for place, (name, label) in enumerate(metrics):
        mine = measured(source.run, name, origin)
        if mine is None:
            continue
        tone = TONES[place % len(TONES)]
        lines.append(Line(label, mine.steps, mine.values, tone=tone))
        theirs = measured(control, name, origin) if control is not None else None
        if theirs is not None:
            lines.append(Line(f"{label}, control", theirs.steps, theirs.values, style="dashed", tone=tone))
    return lines


def scaled(lines: Sequence[Line], label: str) -> Axis:
    """Return an axis that is logarithmic where the values ask for it."""
    return Axis(label, log=spans_decades(*(line.values for line in lines), factor=30.0))


def scopes(run: Run, metric: str) -> dict[str, str]:
    """Return scalar names of ``metric`` for single blocks, else layers, by what the scope is called."""
    for kind in ("block", "layer"):
        head = f"gram/{kind}/"
        found = {
            name.removeprefix(head).removesuffix(f"/{metric}"): name
            for name in run.scalar_names("backlight")
            if name.startswith(head) and name.endswith(f"/{metric}") and "/centred/" not in name
        }
        if len(found) > (1 if kind == "block" else 0):  # of one block its layers tell more
            return found
    return {}


def metric_panel(
    source: Source,
    groups: Sequence[tuple[str, str, Sequence[tuple[str, str]]]],
    *,
    by_scope: tuple[str, str],
    otherwise: str,
    subjects: Sequence[str] = ("gram", "gram/model"),
    facts: Sequence[tuple[str, str]] = (),
) -> Drawn | NotMeasured:
    """Draw scalars of the geometry over steps.

    ``groups`` are charts: title, label of the axis, and the metrics in it as (scalar, label). ``by_scope`` is
    a metric of the Gram, with its label, that is also drawn block by block or layer by layer. ``facts`` are
    scalars, with labels, whose first and last value are listed.
    """
    charts: list[dict[str, Any]] = []
    marked = spans(source)
    for title, label, metrics in groups:
        if lines := lines_of(source, metrics):
            charts.append(chart(lines, scaled(lines, label), title=title, spans=marked))
    remarks: list[str] = []
    metric, label = by_scope
    found = scopes(source.run, metric)
    single = [
        Line(visible(scope), scalar.steps, scalar.values)
        for scope, name in list(found.items())[:SCOPES]
        if (scalar := measured(source.run, name)) is not None
    ]
    if single:
        title = f"{label[0].upper()}{label[1:]} by layer"
        charts.append(chart(single, scaled(single, label), title=title, spans=marked))
    if len(found) > SCOPES:
        remarks.append(f"{len(found)} layers were measured; the first {SCOPES} are drawn.")
    if not charts:
        return NotMeasured(source.reason(*subjects, otherwise=otherwise))
    learning = analysis_of(source)
    if learning is not None and learning.control is None and not learning.facts.control:
        remarks.append("No matched control was found next to this run.")
    listed = [(label, scalar.values) for name, label in facts if (scalar := measured(source.run, name))]
    drawn = (Fact(label, f"{number(values[0])} to {number(values[-1])}") for label, values in listed)
    return Drawn("lines", {"charts": charts}, tuple(drawn), tuple(remarks))


def spectrum_lines(
    steps: NDArray[np.int64], spectra: Sequence[NDArray[Any]], shown: Sequence[int]
) -> list[Line]:
    """Return one line for each of the ``shown`` places (from 1) of the spectra, largest first."""
    lines = []
    for place in shown:
        has = [
            (step, np.sort(s.ravel())[::-1][place - 1])
            for step, s in zip(steps, spectra, strict=True)
            if s.size >= place
        ]
        if has:
            at, values = zip(*has, strict=True)
            lines.append(Line(f"eigenvalue {place}", np.array(at, np.int64), np.array(values, np.float64)))
    return lines
