"""What the panels on the geometry of gradients share: lines of a metric, of its scopes, of the control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.report.charts import Axis, Line, Span, chart, spans_decades
from backlight.report.grokking_verdict import Between, Learning
from backlight.report.panel import Drawn, Fact, NotMeasured
from backlight.report.source import Source
from backlight.store.read.run import Run, Scalar
from backlight.text import number, visible

SCOPES = 8
"""Lines of single layers that one chart can tell apart."""

TONES = ("first", "fourth", "third", "fifth", "second", "sixth")
"""Tones of the metrics of one chart; a control has that of its metric, dashed."""


def spans(learning: Learning | None, *, named: bool = False) -> tuple[Span, ...]:
    """Return the two times as stretches of a chart, ``named`` in its legend as well."""
    if learning is None:
        return ()
    times = (
        ("memorised", "t_m", learning.memorised, "second"),
        ("generalised", "t_g", learning.generalised, "third"),
    )
    return tuple(
        Span(f"{label} {between(time)}" if named else "", mark, time[0], time[1], tone)
        for label, mark, time, tone in times
        if time is not None
    )


def between(time: Between | None) -> str:
    """Return an interval of steps in words: ``(20, 30]``."""
    return "not seen" if time is None else f"({number(time[0])}, {number(time[1])}]"


def figures_of(learning: Learning, source: Source) -> list[dict[str, str]]:
    """Return the numbers under the verdict of a run that was watched for grokking only."""
    accuracy = source.scalar("test_accuracy", source="user")
    last = accuracy.values[-1:]
    return [
        {"label": "verdict", "value": learning.verdict, "note": ""},
        {"label": "memorised in steps", "value": between(learning.memorised), "note": ""},
        {"label": "generalised in steps", "value": between(learning.generalised), "note": ""},
        {
            "label": "last test accuracy",
            "value": number(float(last[0]), 3) if len(last) else "not measured",
            "note": f"at step {number(int(accuracy.steps[-1]))}" if len(last) else "",
        },
        {
            "label": "control",
            "value": learning.control_verdict or ("is one" if learning.is_control else "not run"),
            "note": "random labels" if learning.control_verdict else "",
        },
    ]


def measured(run: Run, name: str, attempt: int | None = None, source: str = "backlight") -> Scalar | None:
    """Return a scalar with at least one log, else None."""
    scalar = run.scalar(name, source=source, attempt=attempt)
    return scalar if len(scalar.steps) else None


def lines_of(source: Source, metrics: Sequence[tuple[str, str]], origin: str = "backlight") -> list[Line]:
    """Return a line for each metric (scalar, label) that was recorded, and a dashed one of the control's."""
    control = source.learning.control if source.learning else None
    lines = []
    for place, (name, label) in enumerate(metrics):
        mine = measured(source.run, name, source.attempt, origin)
        if mine is None:
            continue
        tone = TONES[place % len(TONES)]
        lines.append(Line(label, mine.steps, mine.values, tone=tone))
        theirs = measured(control, name, source=origin) if control is not None else None
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
    by_scope: tuple[str, str] | None = None,
    otherwise: str,
    subjects: Sequence[str] = ("gram", "gram/model"),
    facts: Sequence[tuple[str, str]] = (),
) -> Drawn | NotMeasured:
    """Draw scalars of the geometry over steps.

    Parameters
    ----------
    source:
        The run, with its learning.
    groups:
        Charts: title, label of the axis, and the metrics in it as (scalar, label).
    by_scope:
        A metric of the Gram, with its label, that is also drawn block by block or layer by layer.
    otherwise:
        What is said where nothing was recorded.
    subjects:
        Objects whose recorded reason for not being measured is said first.
    facts:
        Scalars whose first and last value stand next to the chart, as (scalar, label).
    """
    charts: list[dict[str, Any]] = []
    marked = spans(source.learning)
    for title, label, metrics in groups:
        lines = lines_of(source, metrics)
        if lines:
            charts.append(chart(lines, scaled(lines, label), title=title, spans=marked))
    remarks: list[str] = []
    if by_scope is not None:
        metric, label = by_scope
        found = scopes(source.run, metric)
        single = [
            Line(visible(scope), scalar.steps, scalar.values)
            for scope, name in list(found.items())[:SCOPES]
            if (scalar := measured(source.run, name, source.attempt)) is not None
        ]
        if single:
            charts.append(
                chart(
                    single,
                    scaled(single, label),
                    title=f"{label[0].upper()}{label[1:]} by layer",
                    spans=marked,
                )
            )
        if len(found) > SCOPES:
            remarks.append(f"{len(found)} layers were measured; the first {SCOPES} are drawn.")
    if not charts:
        return NotMeasured(source.reason(*subjects, otherwise=otherwise))
    if source.learning is not None and source.learning.control is None and not source.learning.is_control:
        remarks.append("No matched control was found next to this run.")
    drawn_facts = []
    for name, label in facts:
        scalar = measured(source.run, name, source.attempt)
        if scalar is not None:
            drawn_facts.append(Fact(label, f"{number(scalar.values[0])} to {number(scalar.values[-1])}"))
    return Drawn("lines", {"charts": charts}, tuple(drawn_facts), tuple(remarks))


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
