"""The spectra of a layer at a step as a picture, with the axes that all its steps share.

The counterpart of ``assets/kinds/spectra.js``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from backlight.report.plots.style import colours, shortened, tick
from backlight.report.source import Source
from backlight.text import number

PICTURED = 6
"""Layers that get pictures: those with the largest share of signal."""

WIDTH, HEIGHT = 11.0, 10.5
"""Inches of the five charts."""

DECADES_ACROSS, DECADES_UP = 3, 5
"""What is further below the largest is zero but for rounding, and would squeeze the rest into a corner."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """One layer at one step: ``at`` gives a field ``[K]``, ``spectrum`` ``[3, J]`` singular values."""

    layer: Mapping[str, Any]
    step: int
    spectrum: Floats
    at: Callable[[str], Floats]
    figure: Callable[[str], float]


@dataclass(frozen=True)
class Chart:
    """One chart: ``x`` and ``lines`` (label, style, tone, values) of a view, ``band`` (low, high, tone)."""

    title: str
    across: str
    up: str
    x: Callable[[View], Floats]
    lines: Callable[[View], list[tuple[str, str, str, Floats]]]
    band: Callable[[View], tuple[Floats, Floats, str]] | None = None
    log_x: bool = False
    log_y: bool = False


def _relative(values: Floats, by: Floats | None = None) -> Floats:
    of = values if by is None else by
    top = np.nanmax(of, initial=0.0) if np.isfinite(of).any() else 0.0
    return values / top if top > 0 else np.full(len(values), np.nan)


CHARTS = (
    Chart(
        "Singular values of the replicates",
        "rank",
        "singular value",
        lambda v: np.asarray(v.layer["ranks"], np.float64) + 1,
        lambda v: [
            ("median over the replicates", "-", "first", v.spectrum[0]),
            ("noise edge", "--", "limit", np.full(v.spectrum.shape[1], v.figure("edge"))),
        ],
        lambda v: (v.spectrum[1], v.spectrum[2], "first"),
        log_y=True,
    ),
    Chart(
        "Echo against singular value",
        "singular value",
        "spectral echo",
        lambda v: v.at("singular_value"),
        lambda v: [
            ("echo", "-", "first", v.at("echo")),
            ("pooled echo", "-", "second", v.at("pooled")),
            ("residual (1: contradicted)", ":", "fourth", v.at("residual")),
            ("null (95 % of chance)", "--", "limit", v.at("echo_null")),
            ("spiked model", "--", "eighth", v.at("expected")),
            ("echo of the block", ":", "third", v.at("block_echo")),
        ],
        lambda v: (v.at("echo_low"), v.at("echo_high"), "first"),
        log_x=True,
    ),
    Chart(
        "Alignment with the mean of the other replicates",
        "direction",
        "overlap",
        lambda v: np.asarray(v.layer["directions"], np.float64) + 1,
        lambda v: [
            ("left", "-", "first", v.at("left_alignment")),
            ("right", "-", "second", v.at("right_alignment")),
            ("ambiguity (best less second best)", "--", "eighth", v.at("ambiguity")),
        ],
    ),
    Chart(
        "What to make of a singular value",
        "singular value",
        "share of its largest",
        lambda v: v.at("singular_value"),
        lambda v: [
            ("recommended by the data (no model)", "-", "third", _relative(v.at("unbiased"))),
            ("recommended (spiked model)", "-", "first", _relative(v.at("shrunk"))),
            ("Muon's iteration", "-", "fourth", _relative(v.at("muon"))),
            ("left as it is", "--", "eighth", _relative(v.at("singular_value"))),
        ],
        lambda v: (
            _relative(v.at("unbiased_low"), v.at("unbiased")),
            _relative(v.at("unbiased_high"), v.at("unbiased")),
            "third",
        ),
        log_x=True,
    ),
    Chart(
        "Gap to the next direction",
        "direction",
        "gap / noise level",
        lambda v: np.asarray(v.layer["directions"], np.float64) + 1,
        lambda v: [
            ("as observed", "-", "first", v.at("gap")),
            ("without noise (spiked model)", "-", "third", v.at("strength_gap")),
            ("noise joins what is closer", "--", "limit", np.ones(len(v.at("gap")))),
        ],
        log_y=True,
    ),
)


def spectra(source: Source, title: str, data: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the last step of each of the first layers; the first one's picture has the panel's name."""
    figures = {}
    for place, layer in enumerate(data["layers"][:PICTURED]):
        views = views_of(layer, data)
        figure = Figure(figsize=(WIDTH, HEIGHT))
        draw(figure, views[-1], limits_of(views))
        figures[layer["name"] if place else ""] = figure
    return figures


def views_of(layer: Mapping[str, Any], data: Mapping[str, Any]) -> list[View]:
    """Return the steps of a layer."""
    places = {name: place for place, name in enumerate(data["fields"])}
    numbers = {name: place for place, name in enumerate(data["numbers"])}
    tables = np.asarray(layer["table"], np.float64)
    spectrum, figures = np.asarray(layer["spectrum"], np.float64), np.asarray(layer["figures"], np.float64)
    return [
        View(
            layer,
            int(step),
            spectrum[i],
            lambda name, i=i: tables[i, places[name]],  # type: ignore[misc] # mypy knows no default of a lambda
            lambda name, i=i: float(figures[i, numbers[name]]),  # type: ignore[misc] # the same
        )
        for i, step in enumerate(layer["steps"])
    ]


Limits = list[tuple[tuple[float, float], tuple[float, float]]]


def limits_of(views: list[View]) -> Limits:
    """Return the ranges of both axes of each chart over all steps, so that nothing jumps between them."""
    return [
        (
            _range([chart.x(view) for view in views], DECADES_ACROSS if chart.log_x else 0),
            _range(
                [values for view in views for values in _drawn(chart, view)], DECADES_UP if chart.log_y else 0
            ),
        )
        for chart in CHARTS
    ]


def _drawn(chart: Chart, view: View) -> Iterator[Floats]:
    for _, _, _, values in chart.lines(view):
        yield values
    if chart.band is not None:
        yield from chart.band(view)[:2]


def _range(columns: list[Floats], decades: int) -> tuple[float, float]:
    log = decades > 0
    values = np.concatenate(columns)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values):
        return (0.1, 10.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if log:
        low = max(low, high / 10**decades)
        monitor = max(1.1, (high / low) ** 0.04)
        return low / monitor, high * monitor
    monitor = (high - low or 1.0) * 0.05
    return low - monitor, high + monitor


def draw(figure: Figure, view: View, limits: Limits) -> None:
    """Draw the charts of one step into an empty figure."""
    tones = colours()
    figure.subplots_adjust(left=0.07, right=0.985, top=0.9, bottom=0.13, hspace=0.85, wspace=0.18)
    places = figure.subplots(3, 2).ravel()
    for axes, chart, (across, up) in zip(places, CHARTS, limits, strict=False):
        _chart(axes, chart, view, tones)
        axes.set_xlim(across)
        axes.set_ylim(up)
    places[-1].set_axis_off()
    _figures(places[-1], view)
    head = f"{shortened(view.layer['name'], 80)} · {view.layer['shape']} · step {number(view.step)}"
    figure.suptitle(head, x=0.01, ha="left", weight="bold")


def _chart(axes: Axes, chart: Chart, view: View, tones: Mapping[str, str]) -> None:
    x = chart.x(view)
    order = np.argsort(x, kind="stable")
    order = order[np.isfinite(x[order])]
    axes.set_title(chart.title)
    axes.set_xlabel(chart.across)
    axes.set_ylabel(chart.up)
    if chart.log_x:
        axes.set_xscale("log")
        # Few numbers to a decade, and none in mathematical markup, which pictures do not parse.
        axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if chart.log_y:
        axes.set_yscale("log")
    if chart.band is not None:
        low, high, tone = chart.band(view)
        axes.fill_between(
            x[order], low[order], high[order], color=tones[f"tone-{tone}"], alpha=0.25, lw=0, label="interval"
        )
    for label, style, tone, values in chart.lines(view):
        few: dict[str, Any] = {"marker": "o", "ms": 2.5} if style == "-" else {}
        shown = values[order]
        if chart.log_y:
            shown = np.where(shown > 0, shown, np.nan)
        axes.plot(x[order], shown, style, color=tones[f"tone-{tone}"], lw=1.2, label=label, **few)
    if chart.log_x and view.figure("edge") > 0:
        axes.axvline(view.figure("edge"), color=tones["tone-limit"], alpha=0.45, lw=1.2)
    if chart.log_y:
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=tones["line"], lw=0.6)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.24), ncols=2, borderaxespad=0, handlelength=1.6)


def _figures(axes: Axes, view: View) -> None:
    entries = (
        ("replicates", "replicates"), ("samples in each", "batch"), ("noise level", "noise_sigma"),
        ("noise edge", "edge"), ("signal share", "signal_share"), ("noise scale", "noise_scale"),
        ("identifiable directions", "identifiable"), ("stable rank, gradient", "stable_rank_gradient"),
        ("stable rank, weight", "stable_rank_weight"),
    )  # fmt: skip
    for row, (label, name) in enumerate(entries):
        value = view.figure(name)
        at = 0.95 - row * 0.115
        axes.text(0.05, at, label, va="top")
        text = "not measured" if np.isnan(value) else number(value, 3)
        axes.text(0.62, at, text, va="top", weight="bold")
