"""What follows every operation of a process stays behind where that forks: workers are not looked at."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Pausable(Protocol):
    """Something that records nothing while it is ``paused``."""

    paused: bool


_KNOWN: weakref.WeakSet[Pausable] = weakref.WeakSet()


def pause_in_children(recorder: Pausable) -> None:
    """Have ``recorder`` paused in every process that this one forks."""
    _KNOWN.add(recorder)


def _pause() -> None:
    for recorder in _KNOWN:
        recorder.paused = True


os.register_at_fork(after_in_child=_pause)
