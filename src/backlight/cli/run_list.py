"""Prints a list of runs: state, start, duration, steps, last loss and findings, in 80 columns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from backlight.cli.console import print_json
from backlight.records import RunStatus, Severity
from backlight.terminal import make_console
from backlight.text import number, visible

if TYPE_CHECKING:
    from rich.console import Console

    from backlight.store.read.run_list import ListedRun


_STATES = {RunStatus.RUNNING: "bold green", RunStatus.FAILED: "bold red", RunStatus.KILLED: "bold red"}
_SEVERITIES = {
    Severity.ERROR: ("error", "bold red"),
    Severity.WARNING: ("warning", "bold yellow"),
}

_COLUMNS = ("run", "state", "started", "took", "steps", "loss", "findings")
_WORDS = {"state", "findings"}
_GAP = "  "
_MIN_NAME = 8


def print_runs(runs: Sequence[ListedRun], console: Console) -> None:
    """Print one row for each run, and below the rows what is no run or could not be read.

    Names are there to be copied: the columns that a narrow terminal has no space for are left out. Rows are
    laid out here, since a table of rich takes a millisecond for each.
    """
    rows = [_row(run) for run in runs if run.started is not None]
    if rows:
        _print_rows(rows, console)
    else:
        console.print("no run here; record one: backlight run train.py")
    for run in runs:
        if run.problem:
            console.print(visible(run.problem), style="dim")


def _row(run: ListedRun) -> list[Text]:
    return [
        Text(visible(run.path.name)), Text(run.state.value, _STATES.get(run.state, "")),
        Text(_moment(run.started)), Text(_span(run.seconds)), Text(f"{run.steps:,}"), Text(_loss(run)),
        _findings(run),
    ]  # fmt: skip


def _print_rows(rows: Sequence[Sequence[Text]], console: Console) -> None:
    header = [Text(name, "dim") for name in _COLUMNS]
    columns = [max(cell.cell_len for cell in column) for column in zip(header, *rows, strict=True)]
    for left_out in ((), ("took",), ("took", "started")):
        shown = [i for i, name in enumerate(_COLUMNS) if name not in left_out]
        rest = sum(columns[i] + len(_GAP) for i in shown[1:])
        if columns[0] + rest <= console.width:
            break
    columns[0] = min(columns[0], max(console.width - rest, _MIN_NAME))
    for cells in (header, *rows):
        name, *others = (cells[i] for i in shown)
        names = name.divide(range(columns[0], name.cell_len, columns[0]))  # whole, to be copied
        line = Text.assemble(names[0], " " * (columns[0] - names[0].cell_len))
        for i, cell in zip(shown[1:], others, strict=True):
            space = " " * (columns[i] - cell.cell_len)
            line.append(_GAP)
            line.append_text(cell + space if _COLUMNS[i] in _WORDS else Text(space) + cell)
        for text in (line, *names[1:]):
            console.print(text, soft_wrap=True)


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


_FOLDED = 40
"""Characters that the widest column of a table may be folded to; where it would be less, rows are listed."""


def print_rows(answer: Any, most: int) -> None:
    """Print a table, or each row as a list of its own where a table is wider than the terminal."""
    shown = list(itertools.islice(answer.rows(), most + 1))
    cells = [[_cell(value) for value in row] for row in shown[:most]]
    console = make_console()
    if not cells:
        console.print(f"no rows of {', '.join(answer.names)}", style="dim")
        return
    widths = [
        max(cell_len(name), *(row[index].cell_len for row in cells), 1)
        for index, name in enumerate(answer.names)
    ]
    widest = max(range(len(widths)), key=widths.__getitem__)
    over = sum(widths) + 2 * (len(widths) - 1) - console.width
    if over <= 0 or widths[widest] - over >= _FOLDED:
        table = Table(box=None, pad_edge=False)
        for index, name in enumerate(answer.names):
            numbers = all(isinstance(row[index], (int, float)) for row in shown if row[index] is not None)
            folded = over > 0 and index == widest
            table.add_column(
                name, overflow="fold", no_wrap=not folded, justify="right" if numbers else "left"
            )
        for row in cells:
            table.add_row(*row)
        console.print(table)
    else:
        listed = Table(box=None, pad_edge=False, show_header=False)
        listed.add_column(no_wrap=True, style="bold")
        listed.add_column(overflow="fold")
        for number, row in enumerate(cells):
            if number:
                listed.add_row("", "")
            for name, cell in zip(answer.names, row, strict=True):
                listed.add_row(name, cell)
        console.print(listed)
    if len(shown) > most:
        console.print(f"the first {most} rows; --rows N shows more, --out FILE writes all of them")


def _cell(value: Any) -> Text:
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, float):
        # Times since 1970 are of this size: six digits of one say nothing.
        return Text(f"{value:.13g}" if 1e6 <= abs(value) < 1e12 else f"{value:.6g}")
    return Text(str(value))


def print_tables(tables: Any, *, as_json: bool) -> None:
    """Print the tables with their columns and units."""
    if as_json:
        listed = [{"table": t.name, "meaning": t.meaning, "columns": t.columns} for t in tables.values()]
        print_json(listed)
        return
    console = make_console()
    for described in tables.values():
        console.print(Text.assemble((described.name, "bold"), f"  {described.meaning}"))
        table = Table(box=None, pad_edge=False, show_header=False)
        for column in described.columns:
            table.add_row(f"  {column.name}", column.kind, column.unit, Text(column.meaning, style="dim"))
        console.print(table)
