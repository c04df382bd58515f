"""Prints a list of runs: state, start, duration, steps, last loss and findings, in 80 columns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from backlight.cli.console import make_table
from backlight.records import RunStatus, Severity
from backlight.text import number, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from backlight.store.read.run_list import ListedRun

_STATES = {RunStatus.RUNNING: "bold green", RunStatus.FAILED: "bold red", RunStatus.KILLED: "bold red"}
_SEVERITIES = {
    Severity.ERROR: ("error", "bold red"),
    Severity.WARNING: ("warning", "bold yellow"),
}


def print_runs(runs: Sequence[ListedRun], console: Console) -> None:
    """Print one row for each run, and below the table what is no run or could not be read.

    Names are there to be copied: the columns that a narrow terminal has no space for are left out.
    """
    listed = [run for run in runs if run.started is not None]
    unlimited = console.options.update(max_width=10_000)
    for left_out in ((), ("took",), ("took", "started")):
        table = _table(listed, left_out)
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    if listed:
        console.print(table)
    else:
        console.print("no run here; record one: backlight run train.py")
    for run in runs:
        if run.problem:
            console.print(visible(run.problem), style="dim")


def _table(runs: Sequence[ListedRun], left_out: Sequence[str]) -> Table:
    names = ("state", "started", "took", "steps", "loss", "findings")
    table = make_table("run", *(name for name in names if name not in left_out), left={"state", "findings"})
    for run in runs:
        cells: tuple[str | Text, ...] = (
            Text(run.state.value, _STATES.get(run.state, "")), _moment(run.started), _span(run.seconds),
            f"{run.steps:,}", _loss(run), _findings(run),
        )  # fmt: skip
        shown = (cell for name, cell in zip(names, cells, strict=True) if name not in left_out)
        table.add_row(Text(visible(run.path.name)), *shown)  # whole, to be copied
    return table


def _loss(run: ListedRun) -> str:
    """Return the last loss, and what it is where that is not plain: ``4.2 (sum of 8)``."""
    if run.loss is None:
        return "-"
    return number(run.loss) + (
        f" ({run.loss_label.removesuffix(' losses')})" if run.loss_label != "loss" else ""
    )


def _findings(run: ListedRun) -> Text:
    if run.worst is not None:
        word, style = _SEVERITIES[run.worst]
        return Text.assemble((word, style), f" ({run.findings})")
    if not run.evaluated:
        return Text("-", "dim")
    if run.lacks:
        return Text("incomplete", "yellow")
    return Text("none", "green" if run.state is RunStatus.FINISHED else "")


def _moment(seconds: float | None) -> str:
    then = time.localtime(seconds)
    return time.strftime("%m-%d %H:%M" if then.tm_year == time.localtime().tm_year else "%Y-%m-%d", then)


def _span(seconds: float | None) -> str:
    """Return a time span in at most seven characters: ``12 s``, ``4m 05s``, ``31h 02m``."""
    whole = round(seconds or 0.0)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60}m {whole % 60:02}s" if whole < 3600 else f"{whole // 3600}h {whole % 3600 // 60:02}m"
    )
