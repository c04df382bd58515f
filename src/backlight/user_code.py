"""Lines of the user's code: the innermost frame that belongs neither to torch, Python nor backlight."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

_OWN = str(Path(__file__).parent) + os.sep
_PYTHON = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source code."""

    path: str
    number: int
    function: str = ""

    def __str__(self) -> str:
        """Return ``path:number``, relative to the working directory where that is shorter."""
        path = self.path
        if path.startswith(os.sep):
            near = os.path.relpath(path)
            path = near if not near.startswith("..") else path
        return f"{path}:{self.number}"

    @property
    def text(self) -> str:
        """The source of the line, empty where it cannot be read."""
        return linecache.getline(self.path, self.number).strip()


_users: dict[str, bool] = {}
_lines: dict[tuple[CodeType, int], Line] = {}


def _is_users(path: str) -> bool:
    known = _users.get(path)
    if known is None:
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        library = (str(Path(torch).parent) + os.sep,) if torch else ()
        known = not path.startswith((*library, _OWN, "<"))
        if known and path.startswith(_PYTHON):
            known = any(part in path for part in _INSTALLED)
        _users[path] = known
    return known


def user_line(frame: FrameType | None = None) -> Line | None:
    """Return the line at which user code called into torch; None where no frame is the user's.

    Parameters
    ----------
    frame:
        Where to begin looking outwards; None for the caller.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            key = (code, frame.f_lineno)
            line = _lines.get(key)
            if line is None:
                line = _lines[key] = Line(code.co_filename, frame.f_lineno, code.co_name)
            return line
        frame = frame.f_back
    return None


def definition(function: object) -> Line | None:
    """Return the line at which a Python function is defined, or None."""
    code = getattr(function, "__code__", None)
    return None if code is None else Line(code.co_filename, code.co_firstlineno, code.co_name)
