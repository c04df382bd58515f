"""The gradient of every single backward of a step: before it is accumulated, and before any reduction.

A hook of a leaf sees what one backward gives it, on this rank alone: accumulation adds it to ``.grad``
afterwards, and so do the reductions of DDP and FSDP2. The hooks return nothing, are there during a backward
of a chosen step and at no other time, and so are neither copied with a model nor visible to a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from backlight import clock
from backlight.capture.batches import samples
from backlight.capture.hub import HUB, Listener
from backlight.capture.optimizers import OpenSteps
from backlight.capture.training_threads import outside_modes
from backlight.devices import is_capturing_graph
from backlight.interrupts import is_interrupt


class GradientSink(Protocol):
    """Receiver of the gradients."""

    def leaves(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Return the leaves whose gradients are wanted of this backward, each with a key."""

    def takes(self, key: int, gradient: torch.Tensor) -> None:
        """Take what backward gives a leaf; more than once where it gives it in parts, which add up."""

    def ends(self, *, whole: bool, samples: int | None) -> None:
        """The backward is over; ``whole`` is False where it raised. ``samples`` is None where unknown."""

    def trouble(self, error: Exception) -> None:
        """Something here failed: nothing more comes."""


class Microbatches(Listener):
    """Hands the gradients of single backwards to a sink, which is asked for leaves as each begins.

    ``backwards`` are the outermost ones since :meth:`restart`, ``in_closure`` whether one of them ran inside
    ``optimizer.step``: its weights may be others.
    """

    def __init__(self, sink: GradientSink) -> None:
        self._sink = sink
        self._handles: list[Any] = []
        self._failed = False
        self._inside = OpenSteps()
        self._samples: int | None = None
        self._forwards = 0
        self.backwards = 0
        self.in_closure = False

    def restart(self) -> None:
        """Begin to count anew: a step opens."""
        self.backwards, self.in_closure = 0, False
        self._forwards, self._samples = 0, None

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    @property
    def reads_gradients(self) -> bool:
        """They come from hooks."""
        return False

    # Events

    def forward_begin(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note how many samples an outermost module was called with."""
        if torch.is_grad_enabled():
            self._forwards += 1
            self._samples = samples((args, kwargs))

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Hook the leaves that are wanted."""
        self.backwards += 1
        if self._inside.begun:
            self._inside.drop_raised()
            self.in_closure = self.in_closure or bool(self._inside.begun)
        self._failed = False
        if is_capturing_graph():
            return
        for key, leaf in self._sink.leaves():
            if leaf.requires_grad and leaf.is_leaf:
                handle = leaf.register_hook(partial(_passed, self, key))  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(handle)

    def backward_raised(self, error: BaseException) -> None:
        """Remember that what came is a part only."""
        self._failed = True

    def backward_end(self) -> None:
        """Remove the hooks, and close the replicate."""
        if self._handles:
            self.remove_hooks()
            # Two forwards for one backward: whose samples the gradient is of is not known.
            samples = self._samples if self._forwards == 1 else None
            self._sink.ends(whole=not self._failed, samples=samples)
        self._forwards, self._samples = 0, None

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Note that a backward from here on is one of a closure."""
        self._inside.begin(optimizer)

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer is done."""
        self._inside.end(optimizer)

    def take(self, key: int, gradient: torch.Tensor) -> None:
        """Pass a gradient on; an error is reported, and ends this backward's replicate."""
        if self._failed:
            return
        begin = clock.thread_time()
        try:
            self._sink.takes(key, gradient)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._failed = True
            self._sink.trouble(error)
        HUB.spent += clock.thread_time() - begin


def _passed(microbatches: Microbatches, key: int, gradient: torch.Tensor) -> None:
    if not torch.compiler.is_compiling():
        with outside_modes():
            microbatches.take(key, gradient)
