"""Warnings, shown once, and events about what is not measured.

Training continues whatever fails in backlight; what is lost is reported and recorded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from backlight.interrupts import is_interrupt, suppressed
from backlight.records import EVERYTHING, UNMEASURED
from backlight.terminal import write

if TYPE_CHECKING:
    from backlight.monitor import StepClock
    from backlight.store.write.writer import RunWriter

_BACKLIGHT = str(Path(__file__).parent) + os.sep

# Not a folder above: in an installation, that holds every other package, such as click's.
_SKIPPED = (_BACKLIGHT, contextlib.__file__, threading.__file__)

_COMMANDS = (_BACKLIGHT + "cli" + os.sep, _BACKLIGHT + "launch" + os.sep)

_SHOWN: dict[Any, Any] = {}
"""Warnings that Python's filters have shown in this process."""

Line = tuple[str, int, str]
"""File, line number and module of a line of code."""


def _calling() -> Line | None:
    """Return the line that called backlight, None where a thread or a command of backlight did."""
    frame: FrameType | None = sys._getframe(1)
    torch = getattr(sys.modules.get("torch"), "__file__", None)  # hooks are called from within it
    passed = (*_SKIPPED, str(Path(torch).parent) + os.sep) if torch else _SKIPPED
    while frame is not None and frame.f_code.co_filename.startswith(passed):
        # Below our commands there is no script: it has not begun, is over, or is just importing torch.
        frame = None if frame.f_code.co_filename.startswith(_COMMANDS) else frame.f_back
    if frame is None:
        return None
    return frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__", "<unknown>"))


def _show(text: str, line: Line | None) -> None:
    file, number, module = line or (sys.argv[0] or __file__, 0, "__main__")
    # Not through the warnings module alone: a filter that makes them errors must not end a training run.
    try:
        warnings.warn_explicit(f"backlight: {text}", RuntimeWarning, file, number, module, _SHOWN)
    except RuntimeWarning as warning:
        write(warning, file=sys.stderr)
    except Exception as error:
        if is_interrupt(error):
            raise
        return


class Notifier:
    """Warns the user of one watch; records events once ``writer`` is set, with the step of ``clock``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned: set[str] = set()
        self._made = _calling()
        self.writer: RunWriter | None = None
        self.clock: StepClock | None = None

    def event(self, kind: str, payload: Mapping[str, Any], step: int | None = None) -> None:
        """Record something that happened."""
        if self.writer is not None:
            self.writer.event(step, kind, payload)

    def unmeasured(self, what: str, reason: str) -> None:
        """Record that something is not measured, and why."""
        self.event(UNMEASURED, {"what": what, "reason": reason})

    def trouble(self, error: Exception, lost: str = EVERYTHING, *, is_data: bool = True) -> None:
        """Report once what went wrong in backlight, and what is lost by it.

        ``is_data`` is whether that would have been recorded: the run is incomplete without it.
        """
        reason = f"{type(error).__name__}: {error}"
        self.warn(lost, f"not measured: {lost}, after {reason}")
        with suppressed():
            step = None if self.clock is None else self.clock.index
            self.event(UNMEASURED, {"what": lost, "reason": reason, "lost": is_data}, step)

    def lost(self, reason: str) -> None:
        """Report that the run can no longer be written."""
        self.warn(
            "lost",
            f"the run in {self._path} can no longer be written ({reason}); what follows is not measured",
        )

    def warn(self, about: str, text: str) -> None:
        """Warn the user, once for each ``about``."""
        if about in self._warned:
            return
        self._warned.add(about)
        # With the user's line that led here, or that made the watch where a thread reports; else with the
        # script that a command runs.
        _show(f"{text}. Your training continues unchanged.", _calling() or self._made)

    def remind(self, text: str) -> None:
        """Warn the user at the line that made the watch, of which nothing is left."""
        _show(text, self._made)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Turn an exception into :meth:`trouble`."""
        try:
            yield
        except Exception as error:
            if is_interrupt(error):
                raise
            self.trouble(error)
