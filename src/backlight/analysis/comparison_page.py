"""A comparison as one HTML file: differences, tables side by side, and curves of all runs in a chart each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backlight import __version__
from backlight.analysis.compare import Comparison
from backlight.analysis.comparison_verdict import loss_line
from backlight.analysis.report import source_of
from backlight.analysis.side_by_side import Row
from backlight.monitors.steptime.model.step_comparison import TimeComparison
from backlight.report.overlay import compared, curve_panels, listing
from backlight.report.page import document, write_page
from backlight.store.read.run import Run
from backlight.text import count, duration, number, visible


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
    letters = [side.letter for side in comparison.runs]
    sides = comparison.runs
    rows = [
        ("run", *(side.path for side in sides)),
        ("status", *(side.status for side in sides)),
        ("steps", *(number(side.steps) for side in sides)),
        ("took", *("" if side.seconds is None else duration(side.seconds) for side in sides)),
        *((difference.name, *difference.values) for difference in comparison.differences),
    ]
    yield listing(("", *letters), rows, title="What differs")
    if comparison.findings:
        findings = [
            (row.severity.value, ", ".join(row.present), ", ".join(row.unknown) or "none", row.title)
            for row in comparison.findings
        ]
        yield listing(("", "in", "not checked", "finding"), findings, title="Findings")
    shown = [row for row in comparison.rows if not row.is_equal]
    equal = [row for row in comparison.rows if row.is_equal]
    if comparison.steps is not None:
        first, last = comparison.steps
        over = [f"Medians over steps {first:,} to {last:,}, the last quarter of the common ones."]
    else:
        over = ["The runs have no recorded step in common."]
    hidden = [f"{count(len(equal), 'equal row')} under Details."] if equal else []
    if shown:
        yield _series("Results", shown, letters, [*over, *hidden])
    for times in comparison.times:
        if times.rows:
            yield _times(times, f"Step time of {times.names[1]}" if len(letters) > 2 else "Step time")
    if comparison.kinds is not None:
        yield _times(comparison.kinds, "Kinds of operation")
    parameters = [row for row in comparison.parameters if not row.is_equal]
    if parameters:
        yield _series("Parameters that differ most", parameters, letters, over)
    if equal:
        yield {**_series("Equal rows", equal, letters, over), "place": "details"}


def _series(
    title: str, rows: Sequence[Row], letters: Sequence[str], remarks: Sequence[str]
) -> dict[str, Any]:
    pair = len(letters) == 2
    cells = [
        (row.name, *row.texts, *(["" if row.ratio is None else f"{row.ratio:.3f}"] if pair else []))
        for row in rows
    ]
    heads = ("", *letters, *(["B÷A"] if pair else []))
    return listing(heads, cells, title=title, figures=range(1, len(heads)), remarks=remarks)


def _times(times: TimeComparison, title: str) -> dict[str, Any]:
    first, other = times.names
    heads = ("", f"{first} ms", f"{other} ms", f"{other}÷{first}", "interval", "")
    rows = []
    for row in times.rows:
        ratio, _, interval = row.text.partition(" ")
        milliseconds = (number(ms, 3) for ms in (row.first_ms, row.second_ms))
        rows.append((row.name.replace("_", " "), *milliseconds, ratio, interval.strip("()"), row.verdict))
    remarks = [f"{line}." for line in (*times.trouble, times.basis)]
    return listing(heads, rows, title=title, figures=(1, 2, 3, 4), remarks=remarks)
