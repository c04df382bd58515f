"""A comparison as one HTML file: differences, tables side by side, and curves of all runs in a chart each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backlight import __version__
from backlight.analysis.compare import Comparison
from backlight.analysis.comparison_answer import comparison_tables, loss_line
from backlight.analysis.report import source_of
from backlight.report.overlay import compared, curve_panels, listing
from backlight.report.page import document, write_page
from backlight.store.read.run import Run
from backlight.text import visible


def write_comparison(comparison: Comparison, runs: Sequence[Run], target: Path) -> Path:
    """Write the page of compared runs to ``target`` and return its path."""
    title = " against ".join(side.name or side.path for side in comparison.runs)
    named = [
        (f"{side.letter} {visible(side.path)}", run) for side, run in zip(comparison.runs, runs, strict=True)
    ]
    steps = 0, max(run.last_step() for run in runs)
    detail = " ".join(filter(None, (loss_line(comparison), *comparison.notes)))
    state = compared(title, len(runs), detail, headline=comparison.headline, steps=steps)
    state["verdict"]["status"] = " ".join(times.verdict for times in comparison.times)
    curves = list(curve_panels([(name, source_of(run, ())) for name, run in named]))
    loss = [{**panel, "place": "full"} for panel in curves if panel["name"] == "loss"]
    panels = [*loss, *_tables(comparison), *(panel for panel in curves if panel["name"] != "loss")]
    content = {**state, "panels": panels, "precision": "0 %", "version": __version__}
    return write_page(document(content, visible(title)), target)


def _tables(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for title, table in comparison_tables(comparison).items():
        notes = [f"{note[:1].upper()}{note[1:]}." for note in table.notes]
        place = "details" if title == "Equal rows" else "full"
        yield listing(replace(table, title=title), remarks=notes, place=place)
