"""What the commands that explain a script share in print: rank prefix, source lines, JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from backlight.user_code import Line


def rank_prefix() -> str:
    """Return ``[rank N] `` under a launcher of several processes, else nothing."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return f"[rank {os.environ.get('RANK', '?')}] " if several else ""


def place(line: Line | None) -> str:
    """Return ``path:number`` with the source behind it, empty for None."""
    if line is None:
        return ""
    return f"{line}  {line.text}" if line.text else str(line)


def line_json(line: Line | None) -> dict[str, Any] | None:
    """Return a line as JSON types."""
    if line is None:
        return None
    return {"line": str(line), "function": line.function, "source": line.text}


class Page:
    """Prints plain lines with a little colour, never wrapping or interpreting what a script named."""

    def __init__(self, *, errors: bool = False) -> None:
        self._console = Console(stderr=errors)
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
        self._console.print(text, soft_wrap=True, highlight=False)
        (sys.stderr if self._console.stderr else sys.stdout).flush()


def print_json(answer: Any) -> None:
    """Print an answer as JSON."""
    print(json.dumps(answer, indent=2))
