"""The one way in which text reaches a terminal: nothing in it can act on the terminal or reorder a line.

Names, messages and paths come from scripts, runs and files of others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TextIO

from backlight.standard_error import write_text
from backlight.text import printable

if TYPE_CHECKING:
    from rich.console import Console


def write(
    *parts: object, sep: str = " ", file: TextIO | EllipsisType | None = ..., flush: bool = False
) -> None:
    """Print as :func:`print` does, with control characters other than line breaks as escapes.

    ``file`` is standard output by default. A standard error that is missing, closed or full gets nothing; for
    standard output an OSError passes through.
    """
    text = printable(sep.join(map(str, parts)))
    if file is sys.stderr or file is None:
        write_text(f"{text}\n", sys.stderr)
    else:
        print(text, file=sys.stdout if isinstance(file, EllipsisType) else file, flush=flush)


def make_console(**options: Any) -> Console:
    """Return a console of rich that prints text literally: no markup, and control characters as escapes.

    rich is imported here: its import draws from Python's random generator, which a watched script has to
    find as it would be without backlight.
    """
    return _console_class()(markup=False, highlight=False, emoji=False, **options)  # type: ignore[no-any-return]


@functools.cache
def _console_class() -> Any:
    from rich.console import Console, ConsoleOptions, RenderableType  # noqa: PLC0415 - see make_console
    from rich.segment import Segment  # noqa: PLC0415 - see make_console

    class EscapingConsole(Console):
        """Escapes the text of every segment; styles and movements of the cursor are rich's own."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return EscapingConsole
