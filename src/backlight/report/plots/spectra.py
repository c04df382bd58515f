"""The spectra of a layer at a step as a picture, with the axes that all its steps share.

The counterpart of ``assets/kinds/spectra.js``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from backlight.report.plots.style import colours, tick
from backlight.report.source import Source
from backlight.text import number, shortened, visible

PICTURED = 6
"""Layers that get pictures: those with the largest share of signal."""

WIDTH, HEIGHT = 11.0, 10.5
"""Inches of the five charts."""

DECADES_ACROSS, DECADES_UP = 3, 5
"""What is further below the largest is zero but for rounding, and would squeeze the rest into a corner."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """One layer at one step: its ``spectrum`` ``[4, J]``, its ``fields`` ``[K]`` and ``figures`` by name."""

    layer: Mapping[str, Any]
    step: int
    spectrum: Floats
    values: Sequence[str]
    fields: Mapping[str, Floats]
    figures: Mapping[str, float]

    def column(self, name: str) -> Floats:
        """Return a field, one of the columns that are made of others, or a field relative to another one."""
        name, _, by = name.partition(" / ")
        if by:
            values, of = self.column(name), self.column(by)
            top = float(np.nanmax(of, initial=0.0)) if np.isfinite(of).any() else 0.0
            return values / top if top > 0 else np.full(len(values), np.nan)
        if name in self.values:
            row: Floats = self.spectrum[self.values.index(name)]
            return row
        if name in {"ranks", "directions"}:
            return np.asarray(self.layer[name], np.float64) + 1
        if name == "edge":
            return np.full(self.spectrum.shape[1], self.figures["edge"])
        return np.ones(len(self.fields["gap"])) if name == "one" else self.fields[name]


STYLES = {"line": "-", "dashed": "--"}

Chart = Mapping[str, Any]
"""A chart as the panel declares it."""


def spectra(source: Source, title: str, data: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the last step of each of the first layers; the first one's picture has the panel's name."""
    figures = {}
    for place, layer in enumerate(data["layers"][:PICTURED]):
        views = views_of(layer, data)
        figure = Figure(figsize=(WIDTH, HEIGHT))
        draw(figure, views[-1], data, limits_of(views, data["charts"]))
        figures[layer["name"] if place else ""] = figure
    return figures


def views_of(layer: Mapping[str, Any], data: Mapping[str, Any]) -> list[View]:
    """Return the steps of a layer."""
    tables = np.asarray(layer["table"], np.float64)
    spectrum, figures = np.asarray(layer["spectrum"], np.float64), np.asarray(layer["figures"], np.float64)
    return [
        View(
            layer,
            int(step),
            spectrum[i],
            tuple(data["values"]),
            dict(zip(data["fields"], tables[i], strict=True)),
            dict(zip(data["numbers"], figures[i].tolist(), strict=True)),
        )
        for i, step in enumerate(layer["steps"])
    ]


Limits = list[tuple[tuple[float, float], tuple[float, float]]]


def limits_of(views: list[View], charts: Sequence[Chart]) -> Limits:
    """Return the ranges of both axes of each chart over all steps, so that nothing jumps between them."""
    limits = []
    for chart in charts:
        drawn = [*(name for *_, name in chart["lines"]), *(chart["band"] or ())[2:]]
        across = _range([view.column(chart["x"]) for view in views], DECADES_ACROSS if chart["log_x"] else 0)
        up = [view.column(name) for view in views for name in drawn]
        limits.append((across, _range(up, DECADES_UP if chart["log_y"] else 0)))
    return limits


def _range(columns: list[Floats], decades: int) -> tuple[float, float]:
    log = decades > 0
    values = np.concatenate(columns)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values):
        return (0.1, 10.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if log:
        low = max(low, high / 10**decades)
        margin = max(1.1, (high / low) ** 0.04)
        return low / margin, high * margin
    margin = (high - low or 1.0) * 0.05
    return low - margin, high + margin


def draw(figure: Figure, view: View, data: Mapping[str, Any], limits: Limits) -> None:
    """Draw the charts of one step into an empty figure."""
    tones = colours()
    figure.subplots_adjust(left=0.07, right=0.985, top=0.9, bottom=0.13, hspace=0.85, wspace=0.18)
    places = figure.subplots(3, 2).ravel()
    for axes, chart, (across, up) in zip(places, data["charts"], limits, strict=False):
        _chart(axes, chart, view, tones)
        axes.set_xlim(across)
        axes.set_ylim(up)
    places[-1].set_axis_off()
    _figures(places[-1], view, data["labels"])
    head = f"{shortened(visible(view.layer['name']), 80)} · {view.layer['shape']} · step {number(view.step)}"
    figure.suptitle(head, x=0.01, ha="left", weight="bold")


def _chart(axes: Axes, chart: Chart, view: View, tones: Mapping[str, str]) -> None:
    x = view.column(chart["x"])
    order = np.argsort(x, kind="stable")
    order = order[np.isfinite(x[order])]
    axes.set_title(chart["title"])
    axes.set_xlabel(chart["across"])
    axes.set_ylabel(chart["up"])
    if chart["log_x"]:
        axes.set_xscale("log")
        # Few numbers to a decade, and none in mathematical markup, which pictures do not parse.
        axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if chart["log_y"]:
        axes.set_yscale("log")
    if chart["band"] is not None:
        label, tone, *ends = chart["band"]
        low, high = (view.column(name)[order] for name in ends)
        axes.fill_between(x[order], low, high, color=tones[f"tone-{tone}"], alpha=0.25, lw=0, label=label)
    for label, style, tone, name in chart["lines"]:
        few: dict[str, Any] = {"marker": "o", "ms": 2.5} if style == "line" else {}
        shown = view.column(name)[order]
        if chart["log_y"]:
            shown = np.where(shown > 0, shown, np.nan)
        axes.plot(x[order], shown, STYLES[style], color=tones[f"tone-{tone}"], lw=1.2, label=label, **few)
    if chart["log_x"] and view.figures["edge"] > 0:
        axes.axvline(view.figures["edge"], color=tones["tone-limit"], alpha=0.45, lw=1.2)
    if chart["log_y"]:
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=tones["line"], lw=0.6)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.24), ncols=2, borderaxespad=0, handlelength=1.6)


def _figures(axes: Axes, view: View, labels: Sequence[tuple[str, str]]) -> None:
    for row, (name, label) in enumerate(labels):
        value = view.figures[name]
        at = 0.95 - row * 0.115
        axes.text(0.05, at, label, va="top")
        text = "not measured" if np.isnan(value) else number(value, 3)
        axes.text(0.62, at, text, va="top", weight="bold")
