"""Programs that are run plain and watched: what each is, and what plain Python makes of it."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM

ANY = -1
"""Steps of a program that ends before its run is closed: what was flushed depends on the time it took."""

CONSOLE_SCRIPT = Path(sys.executable).with_name("backlight")

OWN_LINES = re.compile(
    r"^backlight: .*\n|^\S*run\n(?:.*\n)*?next: backlight report .*run\n", flags=re.MULTILINE
)
"""What backlight prints: lines of its own, and the summary."""


@dataclass(frozen=True)
class Program:
    """A program, which begins with ``from training import *``.

    ``code`` and ``errors``, a pattern, are its exit code and standard error under plain Python. ``steps`` are
    recorded where it is watched; None: it leaves no run. ``shell`` is a redirection. ``usual`` programs are
    part of ``make test``.
    """

    text: str
    code: int = 0
    errors: str = ""
    steps: int | None = 5
    command: tuple[str, ...] = ("train.py",)
    environment: Mapping[str, str] = field(default_factory=dict)
    input: str = ""
    shell: str = ""
    usual: bool = False
