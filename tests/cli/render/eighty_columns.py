"""Runs a command on a terminal of 80 columns; exit code 9 with the reasons where a table or a line breaks.

python tests/cli/render/eighty_columns.py memory train.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from backlight.answer import Table
from backlight.cli.console import Page

WIDTH = 80
_print_table = Page.table


def broken(table: Table, rows: int | None = None) -> Iterator[str]:
    """Yield what is wrong with a table at 80 columns: too wide, a wrapped or cut cell, or equal names."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None)
    columns, cells = table.columns, list(table.cells(table.brief if rows is None else rows))
    _print_table(Page(console), dataclasses.replace(table, notes=()), rows)
    lines = stream.getvalue().splitlines()
    head = columns[0].title
    yield from (f"{head}: too wide: {line!r}" for line in lines if Text(line).cell_len > WIDTH)
    if any(column.kind == "text" for column in columns):
        return  # a column of sentences may be folded
    if len(lines) != len(cells) + 1:
        yield f"{head}: a cell is wrapped: {lines!r}"
        return
    shown = range(1, len(columns) - table.wide)
    for line, row in zip(lines[1:], cells, strict=True):
        whole = [row[n] for n in shown if columns[n].kind != "name" and not columns[n].spare]
        yield from (f"{head}: {text!r} is cut" for text in whole if text not in line)
    names = {row[0] for row in cells}
    told = {re.split(r"(?<=\S)  ", line)[0] for line in lines[1:]}
    if len(told) < len(names):
        yield f"{head}: names are not told apart: {sorted(told)}"


def main() -> None:
    """Run the command of the arguments and check what it prints."""
    os.environ.update(COLUMNS=str(WIDTH), FORCE_COLOR="1", TERM="xterm")
    found: list[str] = []

    def checked(self: Page, table: Table, rows: int | None = None) -> None:
        found.extend(broken(table, rows))
        _print_table(self, table, rows)

    Page.table = checked  # type: ignore[method-assign]
    from backlight.cli import app

    code, printed = 0, io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            app.main(sys.argv[1:])
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
    lines = [Text.from_ansi(line) for line in printed.getvalue().splitlines()]
    # A path that is longer than the terminal stays in one piece.
    found += [
        f"a line is not broken between words: {line.plain!r}"
        for line in lines
        if line.cell_len > WIDTH and " " in line.plain.strip()
    ]
    print(*lines, sep="\n")
    print(*found, sep="\n", file=sys.stderr)
    sys.exit(9 if found else code)


if __name__ == "__main__":
    main()
