"""Prints the answer to a query, and the tables that it can use."""

from __future__ import annotations

import itertools
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from backlight.cli.console import print_json
from backlight.terminal import make_console

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
    for known in tables.values():
        console.print(Text.assemble((known.name, "bold"), f"  {known.meaning}"))
        table = Table(box=None, pad_edge=False, show_header=False)
        for column in known.columns:
            table.add_row(f"  {column.name}", column.kind, column.unit, Text(column.meaning, style="dim"))
        console.print(table)
