"""Parts of what commands print: lines with the rank prefix, source lines, tables, JSON."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import textwrap
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from backlight import codec
from backlight.distributed import world
from backlight.terminal import make_console, write
from backlight.text import told_apart, visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

    from backlight.answer import Answer
    from backlight.answer import Table as AnswerTable


FACTS = 10
"""Lines that a command prints after its verdict; ``--full`` prints the tables."""

_BEFORE_UNIT = re.compile(r"(?<=[<>]) (?=\d)|(?<=\d) (?=(?:%|[m\u00b5]?s|[kMGT]?B)(?!\w))")
"""Spaces at which no line ends: those of ``12.5 ms``."""

MIN_NAME = 12
"""Columns to which a name in a table is shortened at most."""


def make_table(
    first: str,
    *columns: str,
    left: Collection[str] = (),
    folded: Collection[str] = (),
    named: Collection[str] = (),
) -> Table:
    """Return a table without borders: names, which are shortened where space is short, then numbers.

    ``left`` are columns of words, ``folded`` such that may be folded, ``named`` further columns of names.
    """
    table = _table_class()(box=None, pad_edge=False, header_style="dim", title_justify="left")
    table.add_column(first, overflow="fold")
    for name in columns:
        words = name in {*left, *folded, *named}
        may_shrink = name in {*folded, *named}
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not may_shrink)
    table.named = {0, *(index for index, name in enumerate(columns, 1) if name in named)}
    return table  # type: ignore[no-any-return]


@functools.cache
def _table_class() -> Any:
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    class Name:
        """A cell with a name, shortened in the middle so that it differs from the others of its column."""

        def __init__(self, name: str, column: list[str]) -> None:
            self._name, self._column = name, column

        def __rich_measure__(self, _console: Console, _options: ConsoleOptions) -> Measurement:
            length = Text(self._name).cell_len
            return Measurement(min(length, MIN_NAME), length)

        def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
            shown = told_apart(self._column, options.max_width).get(self._name, self._name)
            yield Text(shown, no_wrap=True, overflow="crop")

    class NamesTable(Table):
        """A table whose columns ``named`` hold names."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.named: set[int] = set()
            self._names: dict[int, list[str]] = {}

        def add_row(self, *cells: Any, **options: Any) -> None:
            def cell(index: int, value: Any) -> Any:
                if index not in self.named or not isinstance(value, str):
                    return value
                column = self._names.setdefault(index, [])
                column.append(value)
                return Name(value, column)

            super().add_row(*(cell(index, value) for index, value in enumerate(cells)), **options)

    return NamesTable


class Page:
    """Prints lines with colour; never wraps or interprets names from a script."""

    def __init__(self, console: Console | None = None, *, errors: bool = False) -> None:
        self._console = console or make_console(stderr=errors)
        here = world()
        # A launcher may have started several processes that print to one terminal.
        self._prefix = f"[rank {here.rank}] " if here.size > 1 else ""

    def say(self, *parts: tuple[str, str] | str | Text) -> None:
        """Print one line of ``(text, style)`` parts at once."""
        from rich.text import Text

        text = Text(self._prefix)
        for part in parts:
            if isinstance(part, tuple):
                text.append(*part)
            else:
                text.append(part)
        sys.stdout.flush()
        self._console.print(text, soft_wrap=True)
        (sys.stderr if self._console.stderr else sys.stdout).flush()

    def note(self, text: str, label: str = "note") -> None:
        """Print ``note: text``."""
        self.sentence((f"{label}: ", "dim"), text)

    def sentence(self, *parts: tuple[str, str] | str, indent: int = 2) -> None:
        """Print one line as :meth:`say` does; a terminal gets it broken between words, not inside them."""
        from rich.text import Text

        width = max(20, self._console.width - len(self._prefix))
        text = Text.assemble(*parts)
        if not self._console.is_terminal or text.cell_len <= width:
            self.say(*parts)
            return
        blank = " " * indent
        pieces = textwrap.wrap(
            _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text.plain), width, expand_tabs=False,
            replace_whitespace=False, drop_whitespace=False, break_long_words=False,
            break_on_hyphens=False, subsequent_indent=blank,
        )  # fmt: skip
        lengths = (len(piece.removeprefix(blank) if number else piece) for number, piece in enumerate(pieces))
        for number, line in enumerate(text.divide(itertools.accumulate(lengths))):
            line.rstrip()
            blanks = len(line) - len(line.plain.lstrip()) if number else 0
            if line:
                self.say(blank if number else "", line[blanks:])

    def table(self, table: AnswerTable, rows: int | None = None) -> None:
        """Print a table, of at most ``rows`` rows, and its notes."""
        from rich.text import Text

        shown = len(table.columns) - table.wide
        first, *others = table.columns[:shown]
        kinds = {kind: {c.title for c in others if c.kind == kind} for kind in ("word", "text", "name")}
        printed = make_table(
            first.title, *(column.title for column in others),
            left=kinds["word"], folded=kinds["text"], named=kinds["name"],
        )  # fmt: skip
        most = table.brief if rows is None else rows
        for number, cells in enumerate(table.cells(most)):
            # The last row counts those that are left out: it is no name.
            name = Text(cells[0], style="dim") if number == most else cells[0]
            printed.add_row(name, *cells[1:shown])
        self._console.print(printed)
        for note in table.notes:
            self.note(note)
        self._console.print()

    def answer(
        self, answer: Answer, *, full: bool = False, rows: int | None = None, before: str = ""
    ) -> None:
        """Print the verdict with at most ten lines behind it, or with all of them and the tables.

        ``before`` is what options stand in front of.
        """
        findings = answer.findings or ()
        claims = [f"{finding.label}: {finding.title}" for finding in findings]
        facts = [*([] if full else claims), *answer.facts]
        self.sentence((visible(answer.verdict), "bold"))
        for fact in facts if full else facts[:FACTS]:
            self.sentence(f"  {visible(fact)}", indent=4)
        if full:
            if answer.tables:
                self.say()
            for table in answer.tables:
                self.table(table, rows)
            for finding in findings:
                self.sentence((f"{finding.label}: ", "bold"), finding.title)
                self.note(finding.fix, "  fix")
                self.sentence(("  refuted if ", "dim"), finding.refuted_if)
        for note in answer.notes:
            self.note(visible(note))
        if not full and answer.tables:
            where = before and f" Options stand before {before}."
            self.say((f"Tables: --full. All rows: --json.{where}", "dim"))


def print_json(answer: Any) -> None:
    """Print a result as JSON; what JSON does not know becomes its text."""
    write(codec.encode(answer, indent=2))


def print_answer(
    answer: Answer, *, as_json: bool, full: bool = False, rows: int | None = None, before: str = "",
    errors: bool = False,
) -> None:  # fmt: skip
    """Print an answer as JSON, or as text, with ``errors`` on standard error; see :meth:`Page.answer`."""
    if as_json:
        print_json(answer.as_json())
    else:
        Page(errors=errors).answer(answer, full=full, rows=rows, before=before)
