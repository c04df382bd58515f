"""Tell the user's code from libraries, and find the line of the user's code in a stack. No torch."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_BACKLIGHT = Path(__file__).parent.as_posix() + "/"
_STDLIB = tuple({Path(sysconfig.get_path(name)).as_posix() + "/" for name in ("stdlib", "platstdlib")})
_PYTHON_LIBRARY = re.compile(r"/lib(?:64)?/python3[.\d]*/")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
# Also a torch that is not installed into site-packages, and one of another process.
_TORCH = re.compile(
    r"/torch/(?:_|amp/|autograd/|cuda/|distributed/|export/|func/|functional\.py|fx/|jit/|nn/|optim/|overrides\.py"
    r"|profiler/|serialization\.py|utils/)"
)
STDIN_FILE = "<stdin>"
"""The file of a program on standard input."""

_LAUNCHER = _BACKLIGHT + "launch/"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source code."""

    path: str
    number: int
    function: str = ""

    def __str__(self) -> str:
        """Return ``path:number``, relative to the working directory where that is shorter."""
        path = self.path
        if path.startswith(os.sep):
            try:
                near = os.path.relpath(path)
            except OSError:  # the working directory has been removed
                near = ".."
            path = near if not near.startswith("..") else os.path.normpath(path)
        return f"{path}:{self.number}"

    @property
    def text(self) -> str:
        """The source of the line, empty where it cannot be read."""
        return linecache.getline(self.path, self.number).strip()


@cache
def is_third_party(path: str) -> bool:
    """Return whether a file belongs to an installed package other than torch and backlight."""
    path = path.replace("\\", "/")
    return bool(_INSTALLED.search(path)) and not path.startswith(_BACKLIGHT) and not _TORCH.search(path)


@cache
def is_user_code(path: str) -> bool:
    """Return whether a file belongs to neither Python, torch, backlight nor another installed package."""
    path = path.replace("\\", "/")
    library = path != STDIN_FILE and path.startswith((_BACKLIGHT, "<", *_STDLIB))
    return bool(path) and not (
        library or _INSTALLED.search(path) or _PYTHON_LIBRARY.search(path) or _TORCH.search(path)
    )


def is_launcher(path: str) -> bool:
    """Return whether a file is of the launcher: frames outside of its own started backlight."""
    return path.startswith(_LAUNCHER)


def user_line(frame: FrameType | None = None) -> SourceLine | None:
    """Return the innermost line of the user's code outwards from ``frame``, the caller by default.

    Where no frame is the user's, as for ``python -m package``, the outermost line of a third-party package is
    returned; None where there is none either.
    """
    frame = sys._getframe(1) if frame is None else frame
    outermost = None
    while frame is not None:
        path = frame.f_code.co_filename
        if is_user_code(path):
            return _line_of(frame)
        if is_third_party(path):
            outermost = frame
        elif outermost is not None and is_launcher(path):
            break
        frame = frame.f_back
    return None if outermost is None else _line_of(outermost)


def library_line(frame: FrameType | None = None) -> SourceLine | None:
    """Return the innermost line of a third-party package outwards from ``frame``, the caller by default.

    None where the user's own code is further in, or there is none.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None and not is_user_code(path := frame.f_code.co_filename):
        if is_third_party(path):
            return _line_of(frame)
        frame = frame.f_back
    return None


# One object per line: a tape holds millions of them.
_source_line = cache(SourceLine)


def _line_of(frame: FrameType) -> SourceLine:
    return _source_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def process_script() -> str:
    """Return the script of this process; where that is a library's, as under Ray or pytest, the user's file.

    That is the file of the outermost user code that led to this call; the library's own where none did.
    """
    script = sys.argv[0] if sys.argv else ""
    is_library = is_third_party(script) or Path(script).parent == Path(sys.executable).parent
    frame, script_path = sys._getframe(1) if is_library else None, script
    while frame is not None:
        path = frame.f_code.co_filename
        if path != script and is_user_code(path):
            script_path = path
        frame = frame.f_back
    return script_path


def definition(function: object) -> SourceLine | None:
    """Return the line at which a Python function is defined; None for anything else."""
    code = getattr(function, "__code__", None)
    return None if code is None else SourceLine(code.co_filename, code.co_firstlineno, code.co_name)


def user_scopes(frame: FrameType | None) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield code and names of each frame of the user's code from ``frame`` outwards, and keep nothing."""
    while frame is not None and not is_launcher(frame.f_code.co_filename):
        if is_user_code(frame.f_code.co_filename):
            values = frame.f_locals
            names = dict(values)
            # Before Python 3.13 the frame keeps this copy of its variables, and with it their values.
            if isinstance(values, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                values.clear()
            try:
                yield frame.f_code, names
            finally:
                names.clear()
        frame = frame.f_back
