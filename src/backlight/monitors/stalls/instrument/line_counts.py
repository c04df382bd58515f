"""Counts the lines of the user's code at which the training thread is seen, by phase, a few times a second.

What a phase waits for thus has a name after an ordinary run; ``backlight profile`` samples far more often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from backlight.watchdog.stacks import Frame

FIRST_REPORT = 8
"""Samples after which the counts are reported first; then each time that they have doubled."""

MAX_LINES = 24
"""Lines that a report holds, the most frequent ones."""


class LineCounts:
    """Samples of the line that the training thread is at; ``report`` takes the counts so far."""

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self._report = report
        self._counts: Counter[tuple[str, Frame]] = Counter()
        self._samples = 0
        self._next_report = FIRST_REPORT

    def add(self, phase: str, at: Frame) -> None:
        """Count the line ``at`` in ``phase``."""
        self._counts[phase, at] += 1
        self._samples += 1
        if self._samples >= self._next_report:
            self._next_report *= 2
            self.report()

    def report(self) -> None:
        """Report the counts, unless there are none."""
        if self._counts:
            rows = [
                [phase, f"{at.file}:{at.line}", at.function, samples]
                for (phase, at), samples in self._counts.most_common(MAX_LINES)
            ]
            self._report({"samples": self._samples, "lines": rows})
