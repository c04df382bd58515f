"""Parts of what commands print: lines with the rank prefix, source lines, tables, JSON, progress bars."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from backlight import codec
from backlight.distributed import world
from backlight.terminal import make_console, write
from backlight.text import told_apart, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from backlight.answer import Answer
    from backlight.answer import Table as AnswerTable

    Rows = Sequence[Sequence[Text]]
    from backlight.experiments.runner import TrainingProgress as RunProgress


FACTS = 10
"""Lines that a command prints after its verdict; ``--full`` prints the tables."""

_BEFORE_UNIT = re.compile(r"(?<=[<>]) (?=\d)|(?<=\d) (?=(?:%|[m\u00b5]?s|[kMGT]?B)(?!\w))")
"""Spaces at which no line ends: those of ``12.5 ms``."""

MIN_NAME = 12
"""Columns to which a name in a table is shortened at most."""

_FOLDED = 40
"""Columns that the widest column may be folded to; where it would be less, the rows of a table are listed."""

_GAP = "  "


def _widths(kinds: Sequence[str], shown: Sequence[int], cells: Rows, width: int) -> dict[int, int]:
    """Return the widths of columns: texts and names shrink first, the widest of them the most."""
    natural = {i: max(1, *(row[i].cell_len for row in cells)) for i in shown}
    for stage in ({"text": 1, "name": MIN_NAME}, dict.fromkeys(("number", "word", "text", "name"), 1)):
        least = {i: stage.get(kinds[i], natural[i]) for i in shown}
        natural = {i: min(length, max(width, least[i])) for i, length in natural.items()}
        over = sum(natural.values()) + len(_GAP) * (len(shown) - 1) - width
        while over > 0 and (wide := [i for i in shown if natural[i] > least[i]]):
            natural[max(wide, key=natural.__getitem__)] -= 1
            over -= 1
    return natural


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
        """Print a table, of at most ``rows`` rows, and its notes.

        Rows are laid out here, since a table of rich takes half a millisecond for each.
        """
        from rich.text import Text

        most = table.brief if rows is None else rows
        cells = [[Text(column.title, "dim") for column in table.columns]]
        for row, texts in itertools.zip_longest(table.rows[:most], table.cells(most)):
            # The last row counts those that are left out: it is no name.
            styles = ["dim"] if row is None else [column.style(row) for column in table.columns]
            cells.append([Text(*cell) for cell in itertools.zip_longest(texts, styles, fillvalue="")])
        width = self._console.width
        shown = list(range(len(table.columns) - table.wide))
        lengths = [max(row[i].cell_len for row in cells) + len(_GAP) for i in range(len(table.columns))]
        for i in reversed([i for i in shown if table.columns[i].spare]):
            if sum(lengths[i] for i in shown) - len(_GAP) > width:
                shown.remove(i)
        over = sum(lengths[i] for i in shown) - len(_GAP) - width
        if table.listed and over > 0 and max(lengths) - over < _FOLDED:
            self._list_rows(cells)
        else:
            kinds = [column.kind for column in table.columns]
            if not table.listed and kinds[0] != "text":
                kinds[0] = "name"
            self._print_rows(kinds, cells, _widths(kinds, shown, cells, width))
        for note in table.notes:
            self.note(note)

    def _print_rows(self, kinds: Sequence[str], cells: Rows, widths: Mapping[int, int]) -> None:
        from rich.text import Text

        names = {
            i: told_apart([row[i].plain for row in cells[1:]], width)
            for i, width in widths.items() if kinds[i] == "name"
        }  # fmt: skip
        for number, row in enumerate(cells):
            parts = {}
            for i, width in widths.items():
                cell = row[i]
                if i in names and number:
                    cell.plain = names[i].get(cell.plain, cell.plain)
                whole = cell.cell_len <= width
                parts[i] = [cell] if whole else list(cell.wrap(self._console, width, overflow="fold"))
            for n in range(max(map(len, parts.values()))):
                line = Text()
                for i, width in widths.items():
                    piece = parts[i][n] if n < len(parts[i]) else Text()
                    space = " " * (width - piece.cell_len)
                    line.append(_GAP if i else "")
                    for part in (space, piece) if kinds[i] == "number" else (piece, space):
                        line.append(part)
                line.rstrip()
                self._console.print(line, soft_wrap=True)

    def _list_rows(self, cells: Rows) -> None:
        """Print each row as a list of its own: one line for a column, with its title."""
        from rich.text import Text

        first = max(title.cell_len for title in cells[0])
        width = max(1, self._console.width - first - len(_GAP))
        for number, row in enumerate(cells[1:]):
            self._console.print(*([""] if number else []), end="\n" if number else "")
            for title, cell in zip(cells[0], row, strict=True):
                name = title.plain
                for piece in cell.wrap(self._console, width, overflow="fold") or [Text()]:
                    line = Text.assemble((name.ljust(first), "bold"), _GAP, piece)
                    line.rstrip()
                    self._console.print(line, soft_wrap=True)
                    name = ""

    def answer(
        self, answer: Answer, *, full: bool = False, rows: int | None = None, before: str = ""
    ) -> None:
        """Print the verdict with at most ten lines behind it, or with all of them and the tables.

        ``before`` is what options stand in front of.
        """
        findings = answer.findings or ()
        claims = [f"{finding.label}: {finding.title}" for finding in findings]
        facts = [*([] if full else claims), *answer.facts]
        if answer.verdict:
            self.sentence((visible(answer.verdict), "bold"))
        for fact in facts if full else facts[:FACTS]:
            self.sentence(f"  {visible(fact)}", indent=4)
        if full:
            for number, table in enumerate(answer.tables):
                if number or answer.verdict:
                    self.say()
                self.table(table, rows)
            if answer.tables and (findings or answer.notes):
                self.say()
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


# Progress bars on standard error: of counted work, and of an experiment with loss, accuracies and phase.


@contextlib.contextmanager
def count_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Yield a function that shows how many of how many are done, and a text; silent without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = make_console(stderr=True)
    bar = Progress(
        BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}", markup=False),
        TimeRemainingColumn(), console=console, transient=True, disable=quiet or not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task(what, total=None)

    def show(done: int, total: int, text: str = what) -> None:
        bar.update(task, completed=done, total=total, description=text)

    with bar:
        yield show


class Bar:
    """A bar on standard error; where that is no terminal, a line for each tenth of the run."""

    def __init__(self, name: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._name = name
        self._console = make_console(stderr=True)
        self._tenth = -1
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(name, total=1, text="")

    def __enter__(self) -> Callable[[RunProgress], None]:
        if self._console.is_terminal:
            self._bar.start()
        return self.show

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def warn(self, text: str) -> None:
        """Print a warning above the bar."""
        self._console.print(f"backlight: {text}", style="yellow", soft_wrap=True)

    def show(self, progress: RunProgress) -> None:
        """Show how far the run is."""
        values = progress.values
        parts = [f"loss {_short(values.get('train_loss'))} / {_short(values.get('test_loss'))}"]
        parts += [f"accuracy {_share(values.get('train_accuracy'))} / {_share(values.get('test_accuracy'))}"]
        text = "  ".join([*parts, progress.phase])
        self._bar.update(self._task, completed=progress.step, total=progress.steps, text=text)
        tenth = 10 * progress.step // max(1, progress.steps)
        if not self._console.is_terminal and tenth > self._tenth:
            self._tenth = tenth
            self._console.print(f"{self._name} {progress.step}/{progress.steps}  {text}", soft_wrap=True)


def _short(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"
