"""Parts of what commands print: lines with the rank prefix, source lines, tables, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from backlight.distributed import world
from backlight.records import to_json
from backlight.terminal import make_console, write

if TYPE_CHECKING:
    from rich.table import Table

    from backlight.user_code import SourceLine


def make_table(first: str, *columns: str, left: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """Return a table without borders: a first column that folds, then numbers on the right that do not.

    ``left`` are columns of words, ``folded`` such that may be folded.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left")
    table.add_column(first, overflow="fold")
    for name in columns:
        words = name in {*left, *folded}
        table.add_column(
            name, justify="left" if words else "right", overflow="fold", no_wrap=name not in folded
        )
    return table


def source_line(line: SourceLine | None) -> str:
    """Return ``path:number`` and the source text, empty for None."""
    if line is None:
        return ""
    return f"{line}  {line.text}" if line.text else str(line)


def line_json(line: SourceLine | None) -> dict[str, Any] | None:
    """Return a source line as JSON types."""
    if line is None:
        return None
    return {"line": str(line), "function": line.function, "source": line.text}


class Page:
    """Prints lines with colour; never wraps or interprets names from a script."""

    def __init__(self, *, errors: bool = False) -> None:
        self._console = make_console(stderr=errors)
        here = world()
        # A launcher may have started several processes that print to one terminal.
        self._prefix = f"[rank {here.rank}] " if here.size > 1 else ""

    def say(self, *parts: tuple[str, str] | str) -> None:
        """Print one line of ``(text, style)`` parts at once."""
        from rich.text import Text

        text = Text(self._prefix)
        for part in parts:
            if isinstance(part, str):
                text.append(part)
            else:
                text.append(*part)
        sys.stdout.flush()
        self._console.print(text, soft_wrap=True)
        (sys.stderr if self._console.stderr else sys.stdout).flush()

    def note(self, text: str, label: str = "note") -> None:
        """Print ``note: text``."""
        self.say((f"{label}: ", "dim"), text)


def print_json(answer: Any) -> None:
    """Print a result as JSON; what JSON does not know becomes its text."""
    write(json.dumps(to_json(answer), indent=2, default=str))
