"""Several runs, overlaid as one page: a chart for each measure, a line for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight import __version__
from backlight.report.charts import Axis, Line, chart, spans_decades
from backlight.report.page import document, write_page
from backlight.text import count, visible

SHOWN = 8
"""Runs that one chart can tell apart."""

Series = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True)
class OverlayPage:
    """What the page shows.

    ``runs`` are rows of a table: name, experiment, control, verdict, and both times. ``measures`` are by
    measure and run; ``across`` names the horizontal axis.
    """

    title: str
    runs: Sequence[tuple[str, ...]]
    measures: Mapping[str, Mapping[str, Series]]
    across: str
    remarks: Sequence[str] = ()


def write_overlay(page: OverlayPage, target: Path) -> Path:
    """Write the page to ``target`` and return its path; the file is replaced as a whole, or not at all."""
    return write_page(document(content(page), visible(page.title)), target)


def content(page: OverlayPage) -> dict[str, Any]:
    """Return the page in the form of a run's, so that the same drawers show it."""
    kinds: dict[str, dict[str, Mapping[str, Series]]] = {}
    for name, of_run in page.measures.items():
        kinds.setdefault(_kind(name), {})[name] = of_run
    most = max((len(of_run) for of_run in page.measures.values()), default=0)
    heads = ("run", "experiment", "control", "verdict", "memorised in", "generalised in")
    panels = [listing(heads, page.runs, remarks=(*page.remarks, *left_out(most)))]
    for title in ("Learning curves", "Progress measures", "Geometry of gradients"):
        chosen = kinds.get(title, {})
        charts = [
            drawn for name, of_run in chosen.items() if (drawn := _chart(name, of_run, page)) is not None
        ]
        if charts:
            panels.append(part(title.split(maxsplit=1)[0].lower(), title, "lines", {"charts": charts}))
    every = [steps for of_run in page.measures.values() for steps, _ in of_run.values() if len(steps)]
    ends = (min(int(s[0]) for s in every), max(int(s[-1]) for s in every)) if every else (0, 0)
    state = compared(page.title, len(page.runs), f"By {page.across}.", monitors=("grokking",), steps=ends)
    state["across"] = page.across
    return {**state, "panels": panels, "precision": "0 %", "version": __version__}


def compared(
    name: str,
    runs: int,
    detail: str,
    monitors: Sequence[str] = (),
    headline: str = "",
    steps: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Return what a page of several runs shows next to its panels; ``steps`` are the first and the last."""
    unlike = "" if headline else " A difference between unlike runs is not a difference."
    return {
        "steps": steps,
        "run": {"name": visible(name), "status": "compared", "monitors": list(monitors)},
        "verdict": {
            "tone": "info",
            "headline": visible(headline) or f"{count(runs, 'run')} overlaid",
            "detail": f"{visible(detail)}{unlike}",
            "status": "",
            "about": [],
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


def stated_part(name: str, title: str, text: str) -> dict[str, Any]:
    """Return a panel of a page of several runs that is one line of text."""
    return {"name": name, "title": title, "note": "", "place": "full", "stated": visible(text)}


def listing(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "Runs",
    figures: Sequence[int] = (),
    remarks: Sequence[str] = (),
    place: str = "full",
) -> dict[str, Any]:
    """Return a table, by default of the runs; ``figures`` are the columns that hold numbers."""
    shown = [[visible(cell) for cell in row] for row in rows]
    data = {"name": title, "heads": tuple(heads), "figures": tuple(figures), "rows": shown}
    name = title.lower().replace(" ", "_")
    return part(name, title, "listing", data, [visible(remark) for remark in remarks], place=place)


def left_out(runs: int) -> list[str]:
    """Return the sentence on runs that the charts leave out, if there are any."""
    return [f"The first {SHOWN} runs are drawn in each chart."] if runs > SHOWN else []


def _chart(name: str, of_run: Mapping[str, Series], page: OverlayPage) -> dict[str, Any] | None:
    lines = [
        Line(visible(run), steps, values)
        for run, (steps, values) in list(of_run.items())[:SHOWN]
        if len(steps)
    ]
    if not lines:
        return None
    share = name.endswith("_accuracy")
    axis = (
        Axis("share of samples", low=0.0, high=1.0)
        if share
        else Axis("", log=spans_decades(*(line.values for line in lines), factor=30.0))
    )
    return chart(lines, axis, title=visible(name), across=page.across)


def _kind(name: str) -> str:
    if "/" not in name:
        return "Learning curves"
    return "Progress measures" if name.startswith("progress/") else "Geometry of gradients"
