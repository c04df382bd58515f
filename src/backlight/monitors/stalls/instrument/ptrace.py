"""Consent to be looked at: under restricted tracing a process must name who may read it. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_PR_SET_PTRACER = 0x59616D61


def allow_tracing(pid: int) -> bool:
    """Let process ``pid`` and what it starts take stacks of this process; False where that has no meaning.

    Only the Yama security module asks for it; elsewhere the kernel refuses the call and nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
    return False
