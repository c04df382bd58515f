"""The panel of the monitor activations: signal, gradient and lost units over the depth of a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.activations.model.layers import MeasuredLayer, measured_layers
from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Figures, MonitorSummary, NotMeasured, PanelFact, panel
from backlight.report.source import Source
from backlight.text import count, number, percent, visible

Floats = NDArray[np.float64]

MAX_MODELS = 4
"""Models whose profile is drawn."""

MIN_MEASURED = 0.01
"""A share below which a dead or saturated layer is none of the facts."""


def layers_of(source: Source) -> list[MeasuredLayer]:
    """Return the layers of a run, read once."""
    return source.once(_read)


def _read(source: Source) -> list[MeasuredLayer]:
    return measured_layers(source.run)


def summary(source: Source) -> MonitorSummary | None:
    """Return the summary of a run in which nothing but activations was watched."""
    layers = layers_of(source)
    if not layers:
        return None
    return MonitorSummary(f"Activations of {count(len(layers), 'layer')} were measured.", figures)


def figures(source: Source) -> Figures:
    """Return how much was measured."""
    layers = layers_of(source)
    steps = {int(step) for layer in layers for step in layer["rms"].steps}
    return (
        ("layers", number(len(layers)), "calls of modules in the forward pass"),
        ("steps measured", number(len(steps)), "the first ones, then at growing intervals"),
    )


@panel(
    "activations",
    title="Activations over depth",
    order=65,
    series=("scalars/activations", "events/activation_layers"),
    note="Root mean square of the output of each layer and of the gradient there, in the order of their "
    "calls, at the first and the last measured step; below, dead units, zeros and saturated values.",
    monitor="activations",
    summary=summary,
)
def activations(source: Source) -> Drawn | NotMeasured:
    """Draw one profile of rms and gradient per model, and one of shares."""
    layers = layers_of(source)
    if not layers:
        return NotMeasured(
            source.reason(
                "activations", "activations", otherwise="No forward pass with a backward was observed."
            )
        )
    models = list(dict.fromkeys(layer.model for layer in layers))
    charts, remarks = [], []
    for model in models[:MAX_MODELS]:
        mine = [layer for layer in layers if layer.model == model]
        title = visible(model) if len(models) > 1 else ""
        charts += _charts(mine, title)
    if len(models) > MAX_MODELS:
        remarks.append(f"The first {MAX_MODELS} of {len(models)} models are drawn.")
    return Drawn("lines", {"charts": charts}, tuple(_facts(layers)), tuple(remarks))


def _charts(layers: Sequence[MeasuredLayer], title: str) -> list[dict[str, object]]:
    places, names = np.arange(len(layers), dtype=np.int64), [visible(layer.name) for layer in layers]
    lines = []
    for column, label, axis, tone in (
        ("rms", "output", "left", "first"),
        ("gradient", "gradient", "right", "second"),
    ):
        for at, when, style in ((0, "first", "dashed"), (-1, "last", "line")):
            values = _profile(layers, column, at)
            if np.isfinite(values).any():
                lines.append(Line(f"{label}, {when} step", places, values, axis, style, tone, gaps=True))
    sizes = Axis("rms (output)", log=True), Axis("rms (gradient)", log=True)
    charts = [chart(lines, *sizes, title=title, across="layer", names=names)]
    shares = [
        Line(label, places[is_measured], values[is_measured], recorded=places)
        for column, label in (("zeros", "zeros"), ("saturated", "saturated values"), ("dead", "dead units"))
        if (is_measured := np.isfinite(values := _profile(layers, column, -1))).any()
    ]
    if shares:
        share = Axis("share", low=0, high=1)
        charts.append(chart(shares, share, title=title, across="layer", names=names))
    return charts


def _profile(layers: Sequence[MeasuredLayer], column: str, at: int) -> Floats:
    columns = [layer[column].values for layer in layers]
    return np.array([values[at] if len(values) else np.nan for values in columns], np.float64)


def _facts(layers: Sequence[MeasuredLayer]) -> list[PanelFact]:
    facts = []
    for column, label in (("dead", "most dead units"), ("saturated", "most saturated")):
        measured = [layer for layer in layers if len(layer[column].values)]
        if measured:
            worst = max(measured, key=lambda layer: float(layer[column].values[-1]))
            value = float(worst[column].values[-1])
            if value >= MIN_MEASURED:
                facts.append(PanelFact(label, f"{percent(value)} of {visible(worst.name)}"))
    return facts
