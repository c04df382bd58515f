"""The only starter of threads: neither signals nor lists of threads show the script a thread of backlight."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")

# Private, and the only way out of `threading.enumerate`. After a fork, Python ends threads by another list.
_listed: dict[int, threading.Thread] = getattr(threading, "_active", {})
_lock: Any = getattr(threading, "_active_limbo_lock", None) or threading.Lock()

_running: dict[int, BackgroundThread] = {}

PAUSE_S = 0.01
"""Seconds of a pause of a thread that computes for longer. Without pauses it holds up each operation of the
thread that trains for the interpreter's switch interval, 5 ms: one step would take as long as its work."""

UNBLOCKED = (
    sys.executable, "-I", "-S", "-c",
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    "os.execv(sys.argv[1], sys.argv[1:])",
)  # fmt: skip
"""What a thread of backlight puts before a command: processes inherit the signals that it blocks."""


class BackgroundThread(threading.Thread):
    """A daemon thread that blocks every signal, and that ``threading.enumerate`` does not list.

    A signal that the script blocks in its own threads would else be delivered to this one, and end the
    process; a script that joins every thread it finds would wait for ever.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._is_unlisted = threading.Event()

    def start(self) -> None:
        """Start the thread; a thread has the blocked signals of the one that starts it."""
        with _blocked_signals():
            super().start()
        self._is_unlisted.wait()

    def run(self) -> None:
        """Run the target, unlisted."""
        ident = threading.get_ident()
        _running[ident] = self
        with _lock:
            _listed.pop(ident, None)
        self._is_unlisted.set()
        if sys.platform == "linux":  # what `top -H` shows
            with contextlib.suppress(OSError):
                Path(f"/proc/self/task/{self.native_id}/comm").write_text(self.name[:15], encoding="utf-8")
        try:
            super().run()
        finally:
            del _running[ident]
            with _lock:
                _listed[ident] = self  # Python removes it


def is_own_thread() -> bool:
    """Return whether the current thread is one of backlight."""
    return threading.get_ident() in _running


def own_threads() -> frozenset[int]:
    """Return the identifiers of the running threads of backlight."""
    return frozenset(_running)


@contextlib.contextmanager
def running_user_code() -> Iterator[None]:
    """List a thread of backlight while it calls code of the user, which may ask for the current thread."""
    ident = threading.get_ident()
    thread = _running.get(ident)
    if thread is None:
        yield
        return
    with _lock:
        _listed[ident] = thread
    try:
        yield
    finally:
        with _lock:
            _listed.pop(ident, None)


def unblock_signals() -> None:
    """Block no signal, in a process that a thread of backlight has started."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def executor(workers: int) -> ThreadPoolExecutor:
    """Return an executor for a command, whose threads block every signal."""
    return ThreadPoolExecutor(workers, thread_name_prefix="backlight", initializer=_block_signals)


def _block_signals() -> set[Any]:
    """Block all signals in this thread but those of its own faults; return those that were blocked before."""
    if sys.platform == "win32":
        return set()
    faults = {getattr(signal, name) for name in _FAULTS if hasattr(signal, name)}
    return signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    before = _block_signals()
    try:
        yield
    finally:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
