"""Which steps of optimizers are running: a hook says where one begins, and none that one has raised."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch

_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""Of what torch puts around the step of every class, also where the compiler has wrapped that once more."""


class OpenSteps:
    """Steps that have ``begun`` and not ended; one that raised is over without an end."""

    def __init__(self) -> None:
        self.begun: list[weakref.ref[torch.optim.Optimizer]] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins."""
        self.begun.append(weakref.ref(optimizer))

    def end(self, optimizer: torch.optim.Optimizer) -> bool:
        """End a step; return False where none of ``optimizer`` had begun."""
        for reference in self.begun:
            if reference() is optimizer:
                self.begun.remove(reference)
                return True
        return False

    def drop_raised(self) -> bool:
        """Drop those that are not on the stack of this thread any more; return whether there were any."""
        before = len(self.begun)
        self.begun = [r for r in self.begun if (optimizer := r()) is not None and _is_running(optimizer)]
        return len(self.begun) < before


def _is_running(optimizer: torch.optim.Optimizer) -> bool:
    # The step of an engine is not of torch: its own hook says how it ended.
    return not hooked_steps(type(optimizer)) or _calls(optimizer, most=1) == 1


def _calls(optimizer: torch.optim.Optimizer, most: int) -> int:
    """Return how many calls of a step of ``optimizer`` are on the stack, up to ``most``."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and count < most:
        count += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count


def is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of ``optimizer`` runs within another: one that calls ``super().step()``.

    torch puts its hooks around the step of every class of which there is an instance.
    """
    return len(hooked_steps(type(optimizer))) > 1 and _calls(optimizer, most=2) > 1


def hooked_steps(kind: type[torch.optim.Optimizer]) -> list[Any]:
    """Return the ``step`` of each class of an optimizer around which torch has put its hooks."""
    found = []
    for base in kind.__mro__:
        step = base.__dict__.get("step")
        if getattr(step, "hooked", False):
            found.append(step)
    return found
