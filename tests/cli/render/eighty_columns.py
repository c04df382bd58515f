"""Runs a command on a terminal of 80 columns; exit code 9 with the reasons where a table or a line breaks.

python tests/cli/render/eighty_columns.py memory train.py
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 80


def broken(table: Table, width: int = WIDTH) -> Iterator[str]:
    """Yield what is wrong with a table at this width: too wide, a wrapped or cut cell, or equal names."""
    console = Console(width=width, color_system=None)
    lines = ["".join(part.text for part in line) for line in console.render_lines(table)]
    head = next((column.header for column in table.columns), "")
    yield from (f"{head}: too wide: {line!r}" for line in lines if Text(line.rstrip()).cell_len > width)
    if any(column.overflow == "fold" and not column.no_wrap for column in table.columns[1:]):
        prose = [c for c in table.columns[1:] if c.overflow == "fold" and not c.no_wrap]
        named = getattr(table, "named", set())
        if any(table.columns.index(column) not in named for column in prose):
            return  # a column of sentences may be folded
    if len(lines) != table.row_count + bool(table.show_header):
        yield f"{head}: a cell is wrapped: {lines!r}"
        return
    for column in table.columns[1:]:
        cells = [column.header, *column.cells] if table.show_header else [*column.cells]
        for line, cell in zip(lines, cells, strict=True):
            text = cell.plain if isinstance(cell, Text) else cell
            if isinstance(text, str) and text not in line:
                yield f"{head}: {text!r} is cut"
    first = [getattr(cell, "_name", None) for cell in table.columns[0].cells]
    told = {line.split("  ")[0] for line in lines[1:]}
    if all(first) and len(told) < len(set(first)) and len(set(first)) == table.row_count:
        yield f"{head}: names are not told apart: {sorted(told)}"


def main() -> None:
    """Run the command of the arguments and check what it prints."""
    os.environ.update(COLUMNS=str(WIDTH), FORCE_COLOR="1", TERM="xterm")
    found: list[str] = []
    original = Console.print

    def checked(self: Console, *objects: Any, **options: Any) -> None:
        for each in objects:
            if isinstance(each, Table):
                found.extend(broken(each))
        original(self, *objects, **options)

    Console.print = checked  # type: ignore[method-assign]
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
