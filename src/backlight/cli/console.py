"""The console of all commands: literal text, the rank prefix, source lines, JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from backlight.distributed import world

if TYPE_CHECKING:
    from backlight.user_code import SourceLine


def make_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that prints text literally: brackets of names and messages are no markup."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, markup=False, highlight=False, emoji=False)


def rank_prefix() -> str:
    """Return ``[rank N] `` if a launcher started several processes, else nothing."""
    here = world()
    return f"[rank {here.rank}] " if here.size > 1 else ""


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
        self._prefix = rank_prefix()

    def say(self, *parts: tuple[str, str] | str) -> None:
        """Print one line of ``(text, style)`` parts at once."""
        text = Text(self._prefix)
        for part in parts:
            if isinstance(part, str):
                text.append(part)
            else:
                text.append(*part)
        sys.stdout.flush()
        self._console.print(text, soft_wrap=True)
        (sys.stderr if self._console.stderr else sys.stdout).flush()


def print_json(answer: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(answer, indent=2))
