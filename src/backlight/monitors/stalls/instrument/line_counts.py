"""Counts the lines of the user's code at which the training thread is seen, by phase, a few times a second.

What a phase waits for thus has a name after an ordinary run; ``backlight profile`` samples far more often.
With the line is recorded what it waits for, where the frames show that: a batch of any iterator, or the
device.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from backlight.records import Phase
from backlight.store.format.schema import SAMPLED_BATCH
from backlight.user_code import is_user_code
from backlight.watchdog.stacks import Frame

FIRST_REPORT = 8
"""Samples after which the counts are reported first; then each time that they have doubled."""

MAX_LINES = 24
"""Lines that a report holds, the most frequent ones."""


WAITING = frozenset({
    "item", "tolist", "numpy", "cpu", "nonzero", "float", "int", "bool", "synchronize", "to", "cuda", "copy_",
})  # fmt: skip
"""Functions in C in which a host waits for a device: the last three copy."""

_FOR_ITER = dis.opmap["FOR_ITER"]
_TRAINING = frozenset({Phase.BACKWARD, Phase.OPTIMIZER})
_BEFORE_FORWARD = frozenset({Phase.OTHER, Phase.DATA})


class LineCounts:
    """Samples of the line that the training thread is at; ``report`` takes the counts so far.

    ``called`` returns the name of the function in C that a frame is in.
    """

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self._report = report
        self._counts: Counter[tuple[str, Frame, str]] = Counter()
        self._samples = 0
        self._next_report = FIRST_REPORT

    def add(self, phase: str, at: Frame, waits: str = "") -> None:
        """Count the line ``at`` in ``phase``, which ``waits`` for a batch or in a function for the device."""
        self._counts[phase, at, waits] += 1
        self._samples += 1
        if self._samples >= self._next_report:
            self._next_report *= 2
            self.report()

    def report(self) -> None:
        """Report the counts, unless there are none."""
        if self._counts:
            rows = [
                [phase, f"{at.file}:{at.line}", at.function, samples, waits]
                for (phase, at, waits), samples in self._counts.most_common(MAX_LINES)
            ]
            self._report({"samples": self._samples, "lines": rows})


class WaitNames:
    """Names what a thread waits for by its frames: a batch of an iterator, or the device.

    ``called`` returns the name of the function in C that a frame calls, which takes milliseconds for a long
    function: it is asked once for each instruction.
    """

    def __init__(self, called: Callable[[FrameType], str]) -> None:
        self._called = called
        self._names: dict[tuple[str, int, int], str] = {}
        self._around: set[tuple[str, int, int]] = (
            set()
        )  # loops inside of whose iterator the training itself runs

    def name(self, frames: Iterable[FrameType], phase: Phase, *, device: bool) -> str:
        """Return :data:`SAMPLED_BATCH`, a function of :data:`WAITING`, or an empty text.

        ``frames`` are those of the thread, innermost first.
        """
        innermost = None
        for frame in frames:
            innermost = innermost or frame
            if is_user_code(frame.f_code.co_filename) and self._iterates(frame):
                if phase in _TRAINING:
                    self._around.add(_instruction(frame))
                elif phase in _BEFORE_FORWARD and _instruction(frame) not in self._around:
                    return SAMPLED_BATCH
        if not device or innermost is None:
            return ""
        called = self._name(innermost)
        return called if called in WAITING else ""

    def _iterates(self, frame: FrameType) -> bool:
        """Return whether a frame waits for the next item of a loop or of ``next``."""
        code, at = frame.f_code.co_code, frame.f_lasti
        if not 0 <= at < len(code):
            return False
        return code[at] == _FOR_ITER or (
            dis.opname[code[at]].startswith("CALL") and self._name(frame) == "next"
        )

    def _name(self, frame: FrameType) -> str:
        key = _instruction(frame)
        if key not in self._names:
            self._names[key] = self._called(frame)
        return self._names[key]


def _instruction(frame: FrameType) -> tuple[str, int, int]:
    return frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti
