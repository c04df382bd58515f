"""Which line of the script asked for an operation, exact, for one traced step.

torch.profiler's own stacks name the line at which a function begins, and cost a hook on every Python
call. Here each call of torch gets a range that names the line it stands on; what copies inside such a
call, a layout change within a matrix product for instance, lies in the range of that call.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from backlight.trace.copies import LINE

_LIBRARY = tuple(
    str(Path(module.__file__).parent) + "/"
    for module in (torch, sys.modules["backlight"])
    if module.__file__ is not None
)


class LineRanges:
    """Writes the line of every call of torch into the profile that is being taken."""

    def __init__(self) -> None:
        self._mode: _Lines | None = None

    def begin(self) -> bool:
        """Start; False where another mode is on that could be left in the wrong order."""
        if _modes():
            return False
        self._mode = _Lines()
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # as torch has it
        return True

    def end(self) -> None:
        """Stop; a mode that is not the innermost is only made to let everything pass."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.on = False
        modes = _modes()
        if modes and modes[-1] is mode:
            mode.__exit__(None, None, None)


def lines_possible() -> bool:
    """Tell whether nothing stands against :class:`LineRanges`."""
    return not _modes()


def _modes() -> list[Any]:
    with contextlib.suppress(AttributeError):  # a private name of torch
        stack: Any = torch.overrides._get_current_function_mode_stack
        return list(stack())
    return [None]


class _Lines(TorchFunctionMode):
    on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # Reading an attribute is no operation; backward has many lines, of which this is none.
        if not self.on or name in {"__get__", "backward"}:
            return func(*args, **(kwargs or {}))
        with torch.profiler.record_function(LINE + _line()):
            return func(*args, **(kwargs or {}))


def _line() -> str:
    frame = sys._getframe(2)
    first = frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_LIBRARY):
        frame = first
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
