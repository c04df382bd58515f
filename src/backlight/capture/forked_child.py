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


_PID_BYTES = 8


class ForkedChild:
    """A process that computes while this one goes on; the answer is what JSON carries.

    It exits without releasing anything of the parent and without running its exit handlers. A process in
    between makes it and exits, so that it is no child of this one: a script that waits for its children finds
    none of backlight's.

    Raises
    ------
    ChildError
        If the system has no fork.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        if not hasattr(os, "fork"):
            raise ChildError("needs a forked process, which this system does not support")
        self._inlet, outlet = os.pipe()
        with warnings.catch_warnings():
            # The child runs nothing but the function: threads of the parent cannot be missed by it.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _fork_again(compute, outlet)
        os.close(outlet)
        with contextlib.suppress(ChildProcessError):  # the script may have reaped every child
            os.waitpid(pid, 0)
        self._begin = time.monotonic()
        self._parts: list[bytes] = []

    def answer(self, timeout_s: float, *, wait: bool = True) -> Any:
        """Return the answer, None where it is not there yet; ChildError for an exception or too late."""
        if not self._read(self._begin + timeout_s, wait):
            return None
        try:
            answer = json.loads(b"".join(self._parts)[_PID_BYTES:])
        except ValueError as error:
            raise ChildError(f"ended early: {error}") from None
        if "error" in answer:
            raise ChildError(f"failed: {answer['error']}")
        return answer["answer"]

    def _read(self, deadline: float, wait: bool) -> bool:
        """Read what there is; return whether that is all."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._inlet, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if not selector.select(max(0.0, left) if wait else 0.0):
                    if left > 0 and not wait:
                        return False
                    self.end()
                    raise ChildError(f"took longer than {deadline - self._begin:.0f} s")
                part = os.read(self._inlet, 1 << 20)
                if not part:
                    break
                self._parts.append(part)
        os.close(self._inlet)
        return True

    @property
    def age_s(self) -> float:
        """Seconds since the child began."""
        return time.monotonic() - self._begin

    def end(self) -> None:
        """End the child, whatever it has computed."""
        if not b"".join(self._parts):
            self._parts.append(os.read(self._inlet, _PID_BYTES))  # it writes its pid before anything else
        pid = int.from_bytes(b"".join(self._parts)[:_PID_BYTES], "little")
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGKILL)
        os.close(self._inlet)


def in_child(compute: Callable[[], Any], timeout_s: float) -> Any:
    """Return what ``compute`` returns in a forked child, by JSON; ChildError without an answer in time."""
    return ForkedChild(compute).answer(timeout_s)


def silence() -> None:
    """Let the child print nothing, for functions that run code of the user's."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _fork_again(compute: Callable[[], Any], outlet: int) -> None:
    """Make the child that computes, and leave this process without running anything else."""
    try:
        if not os.fork():
            os.write(outlet, os.getpid().to_bytes(_PID_BYTES, "little"))
            _report(compute, outlet)
    finally:
        os._exit(0)


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
