"""Result of a command: a verdict, the facts behind it, tables and notes.

A table declares its columns once; the terminal (:mod:`backlight.cli.console`), the page
(:mod:`backlight.report.panel`), Markdown (:mod:`backlight.report.markdown`) and JSON (:meth:`Answer.as_json`)
each have one printer for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from backlight import codec
from backlight.records import Finding
from backlight.text import number, visible

Kind = Literal["number", "word", "text", "name"]

NOT_MEASURED = "-"
"""Cell of a value that was not measured."""


@dataclass(frozen=True)
class Column:
    """One column: its title, the field of a row that it shows, or a function of the row, and the format.

    Numbers are aligned to the right; a ``text`` may be broken into lines, a ``name`` shortened. What a
    column ``adds`` up is shown for the rows that are left out as well. None is a value not measured. A
    terminal shows a cell in ``style(row)``, and leaves out ``spare`` columns, the last first, where it is too
    narrow for all.
    """

    title: str
    key: str | Callable[[Any], Any]
    show: Callable[[Any], str] = number
    kind: Kind = "number"
    adds: bool = False
    style: Callable[[Any], str] = lambda _: ""
    spare: bool = False

    def value(self, row: Any) -> Any:
        """Return the value of a record, or of a mapping as JSON has it."""
        if callable(self.key):
            return self.key(row)
        return row.get(self.key) if isinstance(row, Mapping) else getattr(row, self.key)

    def cell(self, row: Any) -> str:
        """Return the value as text; nothing in it can act on a terminal or a page."""
        value = self.value(row)
        return NOT_MEASURED if value is None else visible(self.show(value))


def word(title: str, key: str | Callable[[Any], Any], kind: Kind = "word") -> Column:
    """Return a column of words."""
    return Column(title, key, str, kind)


def indexed(titles: Sequence[str], kind: Kind = "word", numbers: Collection[int] = ()) -> tuple[Column, ...]:
    """Return columns of rows that are sequences of texts; those at ``numbers`` hold numbers."""
    return tuple(
        Column(title, itemgetter(n), str, "number" if n in numbers else kind)
        for n, title in enumerate(titles)
    )


@dataclass(frozen=True)
class Table:
    """Rows, records or mappings, with their columns; the first column names a row.

    ``brief`` is how many rows a terminal prints, and ``wide`` how many of the columns at the end it has no
    space for. Notes stand below the table. The page shows ``title``, by default that of the first column. A
    row of a table that may be ``listed`` is printed as a list where a terminal is too narrow for it.
    """

    columns: tuple[Column, ...]
    rows: Sequence[Any]
    brief: int = 12
    notes: tuple[str, ...] = ()
    title: str = ""
    wide: int = 0
    listed: bool = False

    def cells(self, most: int) -> Iterator[list[str]]:
        """Yield at most ``most`` rows as texts, and one for the rows that are left out."""
        for row in self.rows[:most]:
            yield [column.cell(row) for column in self.columns]
        rest = self.rows[most:]
        if rest:
            sums = (
                column.show(sum(column.value(row) or 0 for row in rest)) if column.adds else ""
                for column in self.columns[1:]
            )
            yield [f"{len(rest):,} more", *sums]


@dataclass(frozen=True)
class Answer:
    """What a command answers; ``--json`` prints the fields of the record ``data``, or its rows, a list.

    ``facts`` are the lines behind the verdict, the most important first. ``notes`` are sentences on what was
    not measured, and on what the answer rests.
    """

    verdict: str
    data: Any
    facts: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] | None = None

    def as_json(self) -> Any:
        """Return verdict, facts, the fields of the record and the findings as JSON types; rows are a list."""
        if isinstance(self.data, list):
            return codec.plain(self.data)
        listed = {} if self.findings is None else {"findings": codec.plain(self.findings)}
        return {"verdict": self.verdict, "facts": list(self.facts), **codec.plain(self.data), **listed}


def ms(value: float) -> str:
    """Return milliseconds without their unit, with the decimals that suit them."""
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}"


def share(value: float) -> str:
    """Return a share in percent."""
    return f"{value:.1%}"


def calls(value: float) -> str:
    """Return a number of calls of a step; empty for none."""
    return f"{value:,.6g}" if value else ""


def ended(exit_code: int) -> tuple[str, ...]:
    """Return the note on a script that failed."""
    return (f"the script ended with exit code {exit_code}",) if exit_code else ()
