"""Which thread trains: one is recorded, and what others train at the same time is not mixed into it."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from backlight.user_code import is_user_code

# Operations of backlight outside of the modes of the script, which would see them, and may draw numbers.
#
# Functions of tensor subclasses are left by ``torch._C.DisableTorchFunction``.

count_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)
"""Returns how many dispatch modes this thread has entered, 0 where torch does not say."""


def outside_modes() -> AbstractContextManager[Any]:
    """Return what leaves the dispatch modes of the script for a while.

    Where each call counts, :data:`count_modes` is asked first: a mode is rare.
    """
    if not count_modes():
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415 - rarely needed

    return _disable_current_modes()


class TrainingThreads:
    """The thread of the optimizer steps that are recorded; ``missed`` are optimizers of others that train.

    A training run that moves from thread to thread, as one of an executor does, is recorded wherever it is.
    """

    def __init__(self) -> None:
        self._thread: Callable[[], threading.Thread | None] = lambda: None
        self.ident = 0
        self.optimizers: set[int] = set()
        self.others: set[int] = set()
        self.missed: list[weakref.ref[torch.optim.Optimizer]] = []

    @property
    def is_elsewhere(self) -> bool:
        """Whether this thread trains while another one is recorded."""
        return threading.get_ident() in self.others

    def steps_here(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note the thread in which an optimizer steps; return whether it is the one that is recorded."""
        if self.ident != threading.get_ident():
            thread = self._thread()
            is_moved = thread is None or not thread.is_alive() or id(optimizer) in self.optimizers
            if not is_moved:
                if not any(reference() is optimizer for reference in self.missed):
                    self.missed.append(weakref.ref(optimizer))
                self.others.add(threading.get_ident())
                return False
            self._thread = weakref.ref(threading.current_thread())
            self.ident = threading.get_ident()
            self.others.discard(threading.get_ident())
        self.optimizers.add(id(optimizer))
        return True

    def end(self) -> None:
        """Treat all threads alike from here on: the one that ends the watch may be one of the others."""
        self.others.clear()

    def goes_on(self) -> bool:
        """Return whether the thread that is recorded is another one, and still in code of the user."""
        thread = self._thread()
        return thread is not None and thread.is_alive() and runs_user_code([thread])


def runs_user_code(threads: Iterable[threading.Thread]) -> bool:
    """Return whether any of these threads but the current one is in code of the user.

    A worker of an executor that waits for more is in none.
    """
    frames = sys._current_frames()
    for thread in threads:
        frame = None if thread is threading.current_thread() else frames.get(thread.ident or 0)
        while frame is not None:
            if is_user_code(frame.f_code.co_filename):
                return True
            frame = frame.f_back
    return False
