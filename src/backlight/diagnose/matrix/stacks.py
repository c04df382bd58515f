"""Stacks as py-spy and faulthandler write them, and the place of the user's code in them."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from backlight.diagnose.matrix.observations import Place, Stack

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+).*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_TRACEBACK = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+)(?:, in .*)?$')
_OUTERMOST = {"<module>", "_run_module_as_main"}
_LIBRARIES = ("site-packages", "dist-packages", str(Path(__file__).parents[2]))
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_PYTHON_LIBRARY = re.compile(r"/lib(?:64)?/python3\.\d+/")


def from_pyspy(text: str, sample: int) -> tuple[Stack, ...]:
    """Read what ``py-spy dump --json`` printed.

    Raises
    ------
    ValueError
        If it is something else.
    """
    try:
        rows = json.loads(text)
        stacks = []
        for row in rows:
            frames = tuple(
                Place(
                    str(f["name"]), str(f["filename"]), int(f["line"] or 0),
                    native=not f["line"] and not str(f["filename"]).endswith(".py"),
                )
                for f in row["frames"]
            )  # fmt: skip
            thread = str(row.get("thread_name") or row.get("os_thread_id") or row["thread_id"])
            stacks.append(
                Stack(
                    "py-spy", sample, int(row["pid"]), thread, frames,
                    active=bool(row["active"]), holds_lock=bool(row["owns_gil"]),
                    main=row.get("os_thread_id") == row["pid"],
                )
            )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"not what py-spy dump --json prints: {error!r}") from None
    return tuple(stacks)


def from_faulthandler(text: str, pid: int, sample: int) -> tuple[Stack, ...]:
    """Read what :mod:`faulthandler` wrote; the main thread is the one that runs a module."""
    stacks: list[tuple[str, list[Place]]] = []
    for line in text.splitlines():
        if begin := _THREAD.match(line):
            stacks.append((begin[1], []))
        elif stacks and (frame := _FRAME.match(line)):
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            stacks[-1][1].append(Place(frame["function"], frame["file"], number))
    return tuple(
        Stack(
            "faulthandler", sample, pid, thread, tuple(frames),
            main=bool(frames) and frames[-1].function in _OUTERMOST,
        )
        for thread, frames in stacks
    )  # fmt: skip


def is_users(place: Place) -> bool:
    """Tell whether a frame is neither of Python's library, of an installed package, nor of backlight."""
    if place.native or not place.file or place.file.startswith("<"):
        return False
    if any(part in place.file for part in _LIBRARIES):
        return False
    return not place.file.startswith(_STDLIB) and not _PYTHON_LIBRARY.search(place.file)


def users_place(stack: Stack) -> Place | None:
    """Return the innermost frame of the user's own code, None where there is none."""
    return next((place for place in stack.frames if is_users(place)), None)


def innermost(stack: Stack) -> Place | None:
    """Return the innermost frame that is Python, None where there is none."""
    return next((place for place in stack.frames if not place.native), None)


def native_top(stack: Stack) -> str:
    """Return the native function at the top of a stack, empty where Python itself is at work."""
    if not stack.frames or not stack.frames[0].native:
        return ""
    top = stack.frames[0]
    program = Path(top.file).name
    return "" if program.startswith(("python", "libpython")) else top.function


def at_work(stacks: Sequence[Stack]) -> Stack | None:
    """Return the thread of one dump that the process waits for, None where there is no stack.

    A thread inside a backward of the user comes first (autograd runs it in a thread of its own on
    accelerators), then the main thread, then one that holds the interpreter lock.
    """
    inside = [s for s in stacks if _in_backward(s)]
    main = [s for s in stacks if s.main and s.frames]
    holding = [s for s in stacks if s.holds_lock and users_place(s)]
    for group in (inside, main, holding, [s for s in stacks if users_place(s)]):
        if group:
            return group[0]
    return None


def _in_backward(stack: Stack) -> bool:
    """Tell whether the user's code in this thread was called by autograd."""
    users = [i for i, place in enumerate(stack.frames) if is_users(place)]
    return bool(users) and any(
        place.function.rpartition(".")[2] == "apply" and place.file.endswith("torch/autograd/function.py")
        for place in stack.frames[users[0] :][:3]
    )


def short(place: Place) -> str:
    """Return ``file:line`` with the last part of the path."""
    return f"{Path(place.file).name}:{place.line}"


def traceback_end(text: str) -> tuple[str, str]:
    """Return the error that an output ends with, and the ``file:line`` in the user's code that it came from.

    Either is empty where the output does not tell. faulthandler's report of a fatal signal counts; what
    a launcher says of the failure of its children does not, unless there is nothing else.
    """
    lines = text.splitlines()
    found = []
    for index, line in enumerate(lines):
        if line.startswith("Fatal Python"):
            found.append(_fatal(lines[index:]))
        elif line.startswith("Traceback ("):
            found.append(_exception(lines[index + 1 :]))
    own = [entry for entry in found if not entry[0].startswith(_LAUNCHERS)]
    if own:
        return own[-1]
    # A script that refuses its arguments prints a line and no traceback.
    said = [line for line in lines if _REFUSAL.match(line)]
    if said:
        return said[-1], ""
    return (found[-1][0], "") if found else ("", "")


_LAUNCHERS = ("torch.distributed.elastic.",)
_REFUSAL = re.compile(r"^\S+: error: ")


def _fatal(lines: Sequence[str]) -> tuple[str, str]:
    stacks = from_faulthandler("\n".join(lines), 0, 0)
    place = next((p for s in stacks for p in s.frames if is_users(p)), None)
    return lines[0], f"{place.file}:{place.line}" if place else ""


def _exception(lines: Sequence[str]) -> tuple[str, str]:
    place = ""
    for line in lines:
        if frame := _TRACEBACK.match(line):
            if is_users(Place("", frame["file"], int(frame["line"]))):
                place = f"{frame['file']}:{frame['line']}"
        elif line and not line.startswith(" "):
            return line, place
    return "", place
