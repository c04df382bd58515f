"""How a training was left by an exception: what, where, and whether another rank was at fault. No torch."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from backlight.monitors.stalls.model.stacks import (
    Frame,
    ThreadStack,
    in_collective,
    in_native_backward,
    place,
)

LONGEST = 300
"""Characters of a message that are kept."""

_OF_OTHERS = re.compile(
    r"gloo/transport|connection (closed|reset|refused)|broken pipe|timed? ?out|nccl (error|watchdog)"
    r"|remote (process|worker)",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


@dataclass(frozen=True)
class ExitReason:
    """How a training was left.

    Attributes
    ----------
    error:
        Type and message of the exception, in one line.
    at:
        When, in monotonic seconds.
    line, function:
        The innermost line of the user's own code on its way, None where there is none.
    inside:
        ``a collective`` or ``backward`` where the exception says that another rank or the network was at
        fault there; empty for one of the rank's own.
    asked:
        Somebody interrupted it.
    memory:
        It had no memory left.
    """

    error: str
    at: float
    line: str | None = None
    function: str = ""
    inside: str = ""
    asked: bool = False
    memory: bool = False


def describe(error: BaseException) -> dict[str, Any]:
    """Return how ``error`` ends a training, as a document that :func:`read` takes."""
    frames = _frames(error.__traceback__)
    stack = ThreadStack(0, frames)
    user = place(stack)
    text = " ".join(str(error).split())[:LONGEST]
    kind = type(error).__name__
    return asdict(
        ExitReason(
            error=f"{kind}: {text}" if text else kind,
            at=time.monotonic(),
            line=f"{user.file}:{user.line}" if user is not None else None,
            function=user.method if user is not None else "",
            inside=_inside(error, stack, text),
            asked=isinstance(error, (KeyboardInterrupt, GeneratorExit)),
            memory=isinstance(error, MemoryError) or "OutOfMemory" in kind or bool(_MEMORY.search(text)),
        )
    )


def read(document: Any) -> ExitReason | None:
    """Return what a document says, None where it is none."""
    try:
        return ExitReason(**document)
    except TypeError:
        return None


def _inside(error: BaseException, stack: ThreadStack, text: str) -> str:
    # A wrong argument is refused by ValueError and TypeError; what comes from the backend is neither.
    if not isinstance(error, RuntimeError):
        return ""
    # The wrapper of DDP raises where this rank left something out, which is an error of its own.
    if in_collective(stack) and "nn/parallel/" not in stack.frames[0].file.replace("\\", "/"):
        return "a collective"
    if _OF_OTHERS.search(text):
        return "backward" if in_native_backward(stack) else "a collective"
    return ""


def _frames(traceback: TracebackType | None) -> tuple[Frame, ...]:
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.append(Frame(code.co_filename, traceback.tb_lineno, code.co_qualname))
        traceback = traceback.tb_next
    return tuple(reversed(found))
