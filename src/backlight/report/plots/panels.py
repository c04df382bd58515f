"""One drawer for each kind of panel, on matplotlib; the counterpart of ``assets/kinds`` of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from backlight.report.charts import TONES, Ranges, within
from backlight.report.page_codec import Quantised
from backlight.report.plots.spectra import spectra
from backlight.report.plots.style import Draw, colours, ramp, tick
from backlight.report.source import Source
from backlight.text import power, shortened, visible

WIDTH, HEIGHT = 8.5, 2.6
"""Inches of one chart."""

COLUMNS = 4
"""Entries next to one another in a legend."""

CHARACTERS = 150
"""Characters of a bar's label over the whole width of a flame graph."""

NAMES = 48
"""Rows of a heat map that are named one by one; of more, every n-th."""

Floats = NDArray[np.float64]


def lines(source: Source, title: str, data: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw charts over steps, one below the other, or small ones side by side."""
    charts = data["charts"]
    across = 2 if data.get("small") and len(charts) > 1 else 1
    down = math.ceil(len(charts) / across)
    width = WIDTH if across == 1 else 6.0
    legends = [_legend_shape(chart, width)[1] for chart in charts]
    rows = [max(legends[row * across : (row + 1) * across]) for row in range(down)]
    tall = sum(HEIGHT + 0.2 * amount for amount in rows) + 0.5
    figure = Figure(figsize=(across * width, tall), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for place, chart in enumerate(charts):
        _chart(axes[place], chart, width, source)
    for spare in axes[len(charts) :]:
        spare.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return {"": figure}


def _legend_shape(chart: Mapping[str, Any], width: float) -> tuple[int, int]:
    """Return columns and rows of a legend that fits above a chart of ``width`` inches."""
    labels = [line["label"] for line in chart["lines"]]
    if len(labels) < 2:
        return 1, 0
    longest = max(len(label) for label in labels)
    columns = max(1, min(COLUMNS, len(labels), int(width * 14 / (longest + 7))))
    return columns, math.ceil(len(labels) / columns)


def _chart(left: Axes, chart: Mapping[str, Any], width: float, source: Source) -> None:
    tones, steps = colours(), np.asarray(chart["steps"], np.float64)
    right = left.twinx() if chart["right"] else None
    if right is not None:
        right.spines["right"].set_visible(True)
    by_label = {line["label"]: np.asarray(line["values"], np.float64) for line in chart["lines"]}
    handles: list[Any] = []
    below = {line["downTo"] for line in chart["lines"]}
    ground = np.zeros(len(steps))
    for place, line in enumerate(chart["lines"]):
        axes = right if right is not None and line["axis"] == "right" else left
        axis = chart["right"] if axes is right else chart["left"]
        tone = tones.get(f"tone-{line['tone']}") or tones[f"tone-{TONES[place % len(TONES)]}"]
        breaks, sampled = (np.asarray(line[name], np.int64).reshape(-1, 2) for name in ("breaks", "sampled"))
        at, values = _points(steps, line, log=axis["log"])
        if line["style"] in {"edge", "area"}:
            top = np.asarray(line["values"], np.float64)
            bottom = ground if line["style"] == "area" else by_label.get(line["downTo"])
            if line["style"] == "area":
                top = ground = ground + top
            if bottom is not None:
                shown, low, high = _parted(breaks, steps, bottom, top)
                alpha = 0.6 if line["style"] == "area" else 0.25
                handles.append(
                    axes.fill_between(shown, low, high, color=tone, alpha=alpha, lw=0, label=line["label"])
                )
            continue
        over = ("-", (0, (5, 3)), (0, (2, 3)))[min(line["over"], 2)]
        style = {"dashed": (0, (5, 3))}.get(line["style"], over)
        step: dict[str, Any] = {"drawstyle": "steps-post"} if line["style"] == "steps" else {}
        few = len(at) <= 40 and line["style"] == "line"
        solid = _parted(np.concatenate([breaks, sampled]), at, values)
        (drawn_line,) = axes.plot(*solid, color=tone, lw=1.2, ls=style, label=line["label"], **step)
        if len(sampled):
            axes.plot(*_parted(breaks, at, values), color=tone, lw=0.9, ls=(0, (1, 2)), zorder=1.9, **step)
        if few or len(breaks) or len(sampled):
            dots = np.ones(len(at), np.bool_) if few else _alone(at, values, breaks)
            axes.plot(at[dots], values[dots], "o", color=tone, ms=3)
        if line["label"] not in below:
            handles.append(drawn_line)
        if len(line["odd"]):
            where = steps[np.asarray(line["odd"], np.int64)]
            axes.plot(
                where, np.full(len(where), 0.985), "v", color=tones["cell-broken"], ms=5, clip_on=False,
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    _scale(left, chart["left"])
    if right is not None:
        _scale(right, chart["right"])
    for mark in chart["marks"]:
        left.plot(
            np.asarray(mark["steps"], np.float64), np.full(len(mark["steps"]), 0.02), "|",
            color=tones["cell-broken"], ms=7, transform=left.get_xaxis_transform(),
        )  # fmt: skip
    _spans(left, chart["spans"], tones)
    columns, rows = _legend_shape(chart, width)
    left.set_title(chart["title"], pad=6 + 15 * rows)
    left.set_xlabel(chart["across"])
    if chart["across"] == "step":
        left.set_xlim(source.step_range[0], max(source.step_range[1], source.step_range[0] + 1))
    left.xaxis.set_major_formatter(FuncFormatter(tick))
    left.grid(axis="y", color=tones["line"], lw=0.6)
    if len(handles) > 1:
        left.legend(
                        handles=handles,
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns,
            borderaxespad=0.1, handlelength=1.6, columnspacing=1.2,
        )  # fmt: skip
    elif handles and not chart["left"]["label"] and not chart["title"]:
        left.set_ylabel(str(handles[0].get_label()))


def _points(steps: Floats, line: Mapping[str, Any], *, log: bool) -> tuple[Floats, Floats]:
    """Return what a line goes through: NaN only where it breaks, not where another one has a log."""
    values = np.array(line["values"], np.float64)
    breaks = np.zeros(len(values), np.bool_)
    for name in ("odd", "gap"):
        breaks[np.asarray(line[name], np.int64)] = True
    kept = np.isfinite(values) | breaks
    values[breaks] = np.nan
    if log:
        values[values <= 0] = np.nan
    return steps[kept], values[kept]


def _parted(ranges: Ranges, at: Floats, *columns: Floats) -> tuple[Floats, ...]:
    """Return steps and values with a NaN wherever the way from one to the next lies in one of ``ranges``."""
    ordered = ranges[np.argsort(ranges[:, 0], kind="stable")]
    cuts = np.flatnonzero(within(ordered, (at[:-1] + at[1:]) / 2)) + 1
    return np.insert(at, cuts, at[cuts - 1]), *(np.insert(column, cuts, np.nan) for column in columns)


def _alone(at: Floats, values: Floats, breaks: Ranges) -> NDArray[np.bool_]:
    """Return which points have a break or no value on both sides."""
    shut = within(breaks, (at[:-1] + at[1:]) / 2) | np.isnan(values[:-1]) | np.isnan(values[1:])
    alone: NDArray[np.bool_] = np.concatenate([[True], shut]) & np.concatenate([shut, [True]])
    return alone


def _scale(axes: Axes, axis: Mapping[str, Any]) -> None:
    has = any(np.isfinite(np.asarray(line.get_ydata(), np.float64)).any() for line in axes.get_lines())
    if axis["log"] and (has or axes.collections):
        axes.set_yscale("log", base=axis["base"])
        axes.yaxis.set_minor_formatter(NullFormatter())
        if axis["base"] == 10 and _narrow(
            axes
        ):  # less than one power in view: the numbers between are wanted
            axes.yaxis.set_minor_locator(LogLocator(axis["base"], subs=(2, 5)))
            axes.yaxis.set_minor_formatter(FuncFormatter(tick))
    axes.yaxis.set_major_formatter(FuncFormatter(tick))
    axes.set_ylabel(axis["label"])
    if not axis["log"] and axis["low"] is not None:
        axes.set_ylim(bottom=axis["low"] - (0.02 if axis["high"] is not None else 0))
    if not axis["log"] and axis["high"] is not None:
        axes.set_ylim(top=axis["high"] * 1.03)
    if axis["top"] is not None:
        axes.set_ylim(top=axis["top"])


def _narrow(axes: Axes) -> bool:
    low, high = axes.get_ylim()
    return low > 0 and high / low < 50


def _spans(axes: Axes, spans: Sequence[Mapping[str, Any]], tones: Mapping[str, str]) -> None:
    for span in spans:
        tone = tones[f"tone-{span['tone']}"]
        axes.axvspan(span["after"], span["by"], color=tone, alpha=0.35, lw=1)
        axes.annotate(
            span["mark"], (span["by"], 0.99), xycoords=("data", "axes fraction"), color=tone,
            xytext=(3, 0), textcoords="offset points", va="top", fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip


def parameters(source: Source, title: str, data: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the heat map of every column: steps across, parameters down."""
    edges = np.append(data["first"], data["last"][-1] + 1).astype(np.float64)
    names = [record.name for record in source.parameters]
    figures = {}
    for column in data["columns"]:
        high = _array(column["high"]).reshape(len(names), -1)
        figure, axes = _map(len(names), f"{title}: {visible(column['label'])}")
        broken, measured = (
            _array(data[what][column["series"]]).reshape(len(names), -1) > 0
            for what in ("broken", "measured")
        )
        high = np.where(broken, np.inf, high)
        special = {
            "not measured": ~measured, "from zero": measured & np.isnan(high), "NaN or Inf": np.isinf(high)
        }  # fmt: skip
        if column["scale"] == "log":
            special["exactly zero"] = high == 0
        _cells(axes, figure, edges, high, column["scale"], visible(column["meaning"]), special)
        axes.invert_yaxis()
        every = max(1, math.ceil(len(names) / NAMES))
        rows = range(0, len(names), every)
        axes.set_yticks(
            [row + 0.5 for row in rows], [shortened(visible(names[row])) for row in rows], fontsize=6
        )
        figures["" if column is data["columns"][0] else column["name"]] = figure
    return figures


def exponents(source: Source, title: str, data: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the histogram of exponents over steps, of all parameters together."""
    whole = data["all"]
    share = _array(whole["share"]).reshape(data["bins"], -1)
    edges = np.append(whole["first"], whole["last"][-1] + 1).astype(np.float64)
    used = np.flatnonzero((np.nan_to_num(share) > 0).any(axis=1))
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, data["bins"])
    figure, axes = _map(high - low, title)
    share = np.where(share == 0, np.nan_to_num(share, nan=1.0)[share > 0].min(initial=1.0), share)[low:high]
    _cells(axes, figure, edges, share, "log", "share of values", {"not measured": np.isnan(share)})
    rows = range(0, high - low, 2)
    axes.set_yticks(
        [row + 0.5 for row in rows], [power("2", data["lowest"] + low + row) for row in rows], fontsize=7
    )
    return {"": figure}


def _map(rows: int, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, min(9.0, max(2.5, 0.13 * rows + 1.2))), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(FuncFormatter(tick))
    return figure, axes


SPECIAL = {
    "not measured": "cell-hatch", "from zero": "cell-undefined", "exactly zero": "cell-zero",
    "NaN or Inf": "cell-broken",
}  # fmt: skip
"""Tones of cells that are no value of the colour bar."""


def _cells(
    axes: Axes,
    figure: Figure,
    edges: Floats,
    cells: Floats,
    scale: str,
    label: str,
    special: Mapping[str, NDArray[np.bool_]],
) -> None:
    """Colour cells [R, B]; those that are ``special`` have a tone of their own and a place in a legend."""
    tones = colours()
    colour = LinearSegmentedColormap.from_list("ramp", ramp())
    positive = cells[np.isfinite(cells) & (cells > 0)]
    norm: Normalize = Normalize(0, 1 if scale == "share" else max(1.0, float(positive.max(initial=1.0))))
    if scale == "log":
        low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.1, 1.0)
        norm = LogNorm(low, high if high > low else 2 * low)
    values = np.isfinite(cells) & ((cells > 0) if scale == "log" else True)
    rows = np.arange(len(cells) + 1)
    shown = np.ma.masked_where(~values, np.where(values, cells, 1.0))
    mesh = axes.pcolormesh(edges, rows, shown, cmap=colour, norm=norm, rasterized=True)
    patches = []
    for name, where in special.items():
        if where.any():
            single_colour = LinearSegmentedColormap.from_list(name, [tones[SPECIAL[name]]] * 2)
            over = np.ma.masked_where(~where, np.ones_like(cells))
            axes.pcolormesh(edges, rows, over, cmap=single_colour, rasterized=True)
            patches.append(Patch(color=tones[SPECIAL[name]], label=name))
    if patches:
        axes.legend(
            handles=patches,
            loc="lower right",
            bbox_to_anchor=(1, 1.0),
            ncols=3,
            borderaxespad=0.2,
            handlelength=1,
        )
    figure.colorbar(mesh, ax=axes, label=label, format=FuncFormatter(tick), pad=0.01)


def depth(source: Source, title: str, data: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the spread of the rms over steps, parameter by parameter in model order."""
    tones, spread = colours(), np.asarray(data["spread"], np.float64)
    at = np.arange(spread.shape[1])
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    kept = np.where(spread > 0, spread, np.nan)
    axes.fill_between(
        at, kept[0], kept[4], color=tones["tone-eighth"], alpha=0.25, lw=0, label="smallest to largest"
    )
    axes.fill_between(
        at, kept[1], kept[3], color=tones["tone-first"], alpha=0.3, lw=0, label="middle 80 % of steps"
    )
    axes.plot(at, kept[2], color=tones["tone-first"], lw=1.2, label="median")
    if np.isfinite(kept).any():
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(tick))
    axes.set_title(title)
    axes.set_ylabel("rms (gradient)")
    axes.set_xlabel("parameter, in model order")
    axes.legend(ncols=3, loc="upper right")
    return {"": figure}


def flame(source: Source, title: str, data: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw stacks as bars, each on top of its caller and as wide as its share of a step."""
    levels = 1 + max(bar["level"] for bar in data["bars"])
    figure = Figure(figsize=(WIDTH, 0.6 + 0.22 * levels), layout="constrained")
    axes = figure.subplots()
    tones = colours()
    for bar in data["bars"]:
        colour = tones[f"tone-{TONES[bar['phase'] % len(TONES)]}"]
        axes.barh(bar["level"], bar["width"], 0.95, bar["begin"], color=colour, alpha=0.35, edgecolor="white")
        room = int(bar["width"] * CHARACTERS)
        if room > 2:
            axes.text(bar["begin"] + 0.004, bar["level"], bar["label"][:room], va="center", fontsize=6.5)
    axes.set_title(title)
    axes.set_xlim(0, 1)
    axes.set_axis_off()
    return {"": figure}


def _array(node: Any) -> Floats:
    return np.asarray(node.values if isinstance(node, Quantised) else node, np.float64)


DRAWERS: dict[str, Draw] = {
    "lines": lines,
    "parameters": parameters,
    "exponents": exponents,
    "depth": depth,
    "flame": flame,
    "spectra": spectra,
}
"""Drawers by kind of panel; a kind without one is words or a table."""
