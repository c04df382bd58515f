"""Lines on standard error while a run goes on: where it is recorded, and each new error or warning."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, TextIO

from backlight import clock
from backlight.findings.evaluate import separate_hints
from backlight.interrupts import suppressed
from backlight.monitor import Monitor, RunContext
from backlight.notebook import notebook_shell
from backlight.records import Finding
from backlight.registry import RULES
from backlight.standard_error import write_text
from backlight.text import as_typed, count, printable, visible

if TYPE_CHECKING:
    from backlight.session.settings import Settings

MAX_LINES = 5
"""Lines about findings within :data:`WINDOW_S` at most; what exceeds them is counted."""

WINDOW_S = 60.0
"""Seconds in which :data:`MAX_LINES` may be printed."""


class PrintMonitor(Monitor):
    """Prints one line for each rule that found something new; on rank 0 only.

    The lines go to the standard error that was there when the watch was entered: where the script redirects
    it later, it gets nothing that it did not write.
    """

    name = "print"
    requested_by = None
    records = "lines about new findings"

    def __init__(self) -> None:
        self._is_script = False
        self._printed: deque[float] = deque()
        self._left = 0
        self._ended = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor unless nothing is to be printed, or the cell of a notebook shows it."""
        return None if settings.quiet or notebook_shell() is not None else cls()

    def check_process(self, *, is_script: bool) -> None:
        """Remember whether a command runs the script."""
        self._is_script = is_script

    def attach(self, run: RunContext) -> None:
        """Print where the run of a script is recorded."""
        self._ended = False
        self._stream, self._path = sys.stderr, run.path
        if self._is_script and not run.rank and self._stream is not None:
            path = visible(as_typed(run.path))
            write_text(f"backlight: recording in {path}; live page: backlight open {path}\n", self._stream)

    def detach(self, error: BaseException | None) -> None:
        """Print nothing more: all findings are printed at the end."""
        self._ended = True

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """Print one line for each rule, the worst first, as long as there are not too many."""
        if self._ended:
            return
        shown = [f for f in separate_hints(findings)[0] if not RULES[f.rule].logged]
        for _, same in groupby(shown, key=lambda finding: (finding.severity, finding.rule)):
            first, *others = same
            if self._left or not self._has_room():
                self._left += 1 + len(others)
                continue
            more = f", and {len(others)} more" if others else ""
            self._print(f"{first.severity}: {visible(first.title)} ({visible(first.rule)}{more})")
        self.on_flush()

    def on_flush(self) -> None:
        """Count what was not printed, once there is room for a line."""
        if self._left and self._has_room(MAX_LINES + 1):
            left, self._left = self._left, 0
            self._print(f"and {count(left, 'more finding')}: backlight findings {visible(self._path)}")

    def _has_room(self, most: int = MAX_LINES) -> bool:
        while self._printed and self._printed[0] < clock.monotonic() - WINDOW_S:
            self._printed.popleft()
        return len(self._printed) < most

    def _print(self, text: str) -> None:
        self._printed.append(clock.monotonic())
        print_line(text, self._stream)


def print_line(text: str, stream: TextIO | None) -> None:
    """Print a line above the progress bars of tqdm, and on a terminal never within a line of the script.

    A stream that is closed or broken gets nothing.
    """
    if stream is None:  # a process without one, for which print would take standard output
        return
    line = printable(f"backlight: {text}")
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with suppressed():  # the script may have put anything there
        if getattr(bars, "_instances", None):
            bars.write(line, file=stream)
            stream.flush()
        else:
            # The script may have printed a part of a line, which cannot be asked for.
            write_text(f"\n{line}\n" if stream.isatty() else f"{line}\n", stream)
