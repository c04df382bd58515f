"""A function computed in a forked child, which sees what the process holds and can change nothing of it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any


class ChildError(RuntimeError):
    """The child gave no answer; the message says why."""


def in_child(compute: Callable[[], Any], timeout_s: float) -> Any:
    """Return what ``compute`` returns in a forked child, as JSON carries it.

    The child exits without releasing anything of the parent and without running its exit handlers.

    Raises
    ------
    ChildError
        If the system has no fork, ``compute`` raises, or there is no answer after ``timeout_s`` seconds.
    """
    if not hasattr(os, "fork"):
        raise ChildError("needs a forked process, which this system does not support")
    inlet, outlet = os.pipe()
    with warnings.catch_warnings():
        # The child runs nothing but the function: threads of the parent cannot be missed by it.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _report(compute, outlet)
    os.close(outlet)
    try:
        answer = json.loads(_read(inlet, child, timeout_s))
    except ValueError as error:
        raise ChildError(f"ended early: {error}") from None
    finally:
        os.close(inlet)
        with contextlib.suppress(ChildProcessError):  # the script may have reaped every child
            os.waitpid(child, 0)
    if "error" in answer:
        raise ChildError(f"failed: {answer['error']}")
    return answer["answer"]


def _read(inlet: int, child: int, timeout_s: float) -> bytes:
    parts: list[bytes] = []
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(inlet, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                os.kill(child, signal.SIGKILL)
                raise ChildError(f"took longer than {timeout_s:.0f} s")
            part = os.read(inlet, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)


def _report(compute: Callable[[], Any], outlet: int) -> None:
    """Compute, write the answer to ``outlet`` and leave the child without running anything else."""
    try:
        gc.freeze()  # a collection would run finalizers of the parent's objects here
        try:
            answer = json.dumps({"answer": compute()})
        except Exception as error:  # noqa: BLE001 - raised by the parent
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        data = memoryview(answer.encode())
        while data:
            data = data[os.write(outlet, data) :]
    finally:
        os._exit(0)
