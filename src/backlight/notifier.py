"""What a session says: events into the run, and each trouble once to the user.

Whatever breaks in backlight, the training goes on; what is lost by it is told and recorded.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backlight.store.write.writer import RunWriter

_OURS = (str(Path(__file__).parent.parent), contextlib.__file__, threading.__file__)

_COMMANDS = str(Path(__file__).parent.parent / "cli")

_SHOWN: dict[Any, Any] = {}
"""What has been shown where Python's filters show it once: to all trainings of a process."""

Line = tuple[str, int, str]
"""A line of somebody's: its file, its number, and the module that it is in."""


def _calling() -> Line | None:
    """Return the line that called backlight, None where a thread or a command of ours did."""
    frame: FrameType | None = sys._getframe(1)
    torch = getattr(sys.modules.get("torch"), "__file__", None)  # hooks are called from within it
    passed = (*_OURS, str(Path(torch).parent)) if torch else _OURS
    while frame is not None and frame.f_code.co_filename.startswith(passed):
        # Below our commands there is no script: it has not begun, or is over.
        frame = None if frame.f_code.co_filename.startswith(_COMMANDS) else frame.f_back
    if frame is None:
        return None
    return frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__", "<unknown>"))


class Notifier:
    """The voice of one watch; silent towards the run until ``writer`` is set."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned: set[str] = set()
        self._made = _calling()
        self.writer: RunWriter | None = None

    def event(self, kind: str, payload: Mapping[str, Any], step: int | None = None) -> None:
        """Record something that happened."""
        if self.writer is not None:
            self.writer.event(step, kind, payload)

    def unmeasured(self, what: str, reason: str) -> None:
        """Record that something is not measured, and why."""
        self.event("unmeasured", {"what": what, "reason": reason})

    def trouble(self, error: Exception, lost: str = "everything from here on") -> None:
        """Tell once what went wrong in backlight, and what is lost by it."""
        reason = f"{type(error).__name__}: {error}"
        self.warn(lost, f"not measured: {lost}, after {reason}")
        with contextlib.suppress(Exception):
            self.unmeasured(lost, reason)

    def left_out(self, probe: str, error: Exception) -> None:
        """Tell that the probe of a plug-in measures nothing more."""
        reason = f"{type(error).__name__}: {error}"
        self.warn(f"probe {probe}", f"the probe {probe!r} of a plug-in is left out: {reason}")
        with contextlib.suppress(Exception):
            self.unmeasured(f"probe {probe}", reason)

    def lost(self, reason: str) -> None:
        """Tell that the run can no longer be written."""
        self.warn(
            "lost",
            f"the run in {self._path} can no longer be written ({reason}); what follows is not measured",
        )

    def warn(self, about: str, text: str) -> None:
        """Warn the user, once for each ``about``."""
        if about in self._warned:
            return
        self._warned.add(about)
        # With the line of the user's that led here, or that watched where a thread of ours tells it, or with
        # the script that a command of ours runs, and no line of it.
        file, line, module = _calling() or self._made or (sys.argv[0] or __file__, 0, "__main__")
        # Not through the warnings module alone: a filter that makes them errors must not end a training.
        try:
            said = f"backlight: {text}. Your training goes on unchanged."
            warnings.warn_explicit(said, RuntimeWarning, file, line, module, _SHOWN)
        except RuntimeWarning as warning:
            print(warning, file=sys.stderr)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Turn an exception of ours into :meth:`trouble`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self.trouble(error)
