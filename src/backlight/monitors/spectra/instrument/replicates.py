"""The spectra monitor in a watched training: the microbatches of chosen steps are replicates of its gradient.

On the step's path gradients are copied and nothing else; a thread beside the training decomposes them. A step
that comes while earlier ones fill the memory is passed over, so that memory and cost stay bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from backlight.capture.batch_size import Inputs
from backlight.capture.microbatches import Microbatches
from backlight.capture.preserve_state import untouched
from backlight.monitors.spectra.instrument import batch_split
from backlight.monitors.spectra.instrument.batches import samples as samples_of
from backlight.monitors.spectra.instrument.layer_selection import Targets
from backlight.monitors.spectra.instrument.rank_exchange import Exchange
from backlight.monitors.spectra.instrument.replicate_buffer import Caught, Waiting, arrivals, copied
from backlight.monitors.spectra.instrument.worker_thread import Beside
from backlight.monitors.spectra.model.options import EVERY, Catching
from backlight.store.write.queue import Queue

if TYPE_CHECKING:
    from backlight.capture.scope import Scope
    from backlight.capture.steps import StepSummary
    from backlight.monitors.spectra.instrument.batch_split import Loss
    from backlight.notifier import Notifier

T = TypeVar("T")

_UNKNOWN = 8
"""Microbatches that are reckoned with before a step was seen."""


class Replicating:
    """Catches the replicates of one watched training; a :class:`backlight.capture.microbatches.GradientSink`.

    Parameters
    ----------
    catching
        What is caught and measured.
    every
        Steps between two measured ones, where ``catching`` does not say.
    samples
        ``(loss_fn, batch)`` for the split of a lone microbatch.
    scope, notifier
        What is watched, and what tells the user.

    Attributes
    ----------
    listener
        What is to be added to the hub, after the tracker.
    queue
        What the thread that writes takes over.
    """

    def __init__(
        self,
        catching: Catching,
        every: int | None,
        samples: tuple[Loss, Any] | None,
        scope: Scope,
        notifier: Notifier,
    ) -> None:
        self._catching = catching
        self._every = catching.every or every or EVERY
        self._samples = samples
        self._scope, self._notifier = scope, notifier
        self.queue = Queue()
        self.listener = Microbatches(self)
        self._inputs = Inputs()
        self._targets = Targets(catching, scope, self.queue, notifier)
        self._exchange = self._opened() if catching.exchange else None
        self._beside = Beside(catching, self.queue, notifier, self._exchange)
        self._waiting: Waiting | None = None
        self._caught: Caught | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._step = -1
        self._chosen = self._passed = self._off = False
        self._expected = _UNKNOWN
        self._size = 0

    def _opened(self) -> Exchange | None:
        try:
            return Exchange.open(self._catching.patience)
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self._notifier.trouble(error, "spectra over the replicates of all ranks")
            return None

    # Life

    def start(self) -> None:
        """Start the thread that measures."""
        self._beside.start()

    def stop(self, *, failed: bool) -> None:
        """Take everything off, and wait for the last step; not for long where the training failed."""
        self.off()
        self._beside.stop(10.0 if failed else self._catching.patience)

    def off(self) -> None:
        """Catch nothing more."""
        self._off, self._chosen = True, False
        self.listener.leave()
        self._inputs.leave()
        self._waiting = None
        self._before = {}

    def trouble(self, error: Exception) -> None:
        """Say once that nothing more is caught."""
        self.off()
        self._notifier.trouble(error, "spectra")

    # Steps

    def opens(self, step: int) -> bool:
        """Take note of a step, and tell whether its microbatches are caught."""
        return bool(self._shielded(lambda: self._opens(step)))

    def collect(self) -> None:
        """Split the batch of a lone microbatch, with the weights before the step."""
        self._shielded(self._collect)

    def update_begins(self) -> None:
        """Keep the weights before the step, for what it adds."""
        self._shielded(self._update_begins)

    def close(self, summary: StepSummary) -> None:
        """Hand a chosen step over to the thread that measures."""
        self._shielded(lambda: self._close(summary))

    def _shielded(self, work: Callable[[], T]) -> T | None:
        # An exception would end what all monitors measure.
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self.trouble(error)
            return None

    def _opens(self, step: int) -> bool:
        self._expected = self.listener.backwards or self._expected
        self.listener.restart()
        self._inputs.leave()
        self._waiting, self._caught, self._before = None, None, {}
        self._step, self._passed = step, False
        self._chosen = not self._off and step % self._every == 0
        if not self._chosen:
            return False
        self._passed = self._beside.busy(self._size)
        if self._passed:
            self._chosen = False
            return False
        self._targets.look()
        self._inputs.follow(self._targets.roots())
        return True

    def leaves(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Return the leaves to hook for the backward that begins."""
        if self._passed:
            self._pass_over()
        if not self._chosen:
            return ()
        return self._targets.leaves() if self._monitor().begin() else ()

    def _monitor(self) -> Waiting:
        """Return where the gradients of this step wait, for what the model holds now."""
        if self._waiting is None:
            self._targets.refresh(self._expected, spread_over=self._exchange)
            budget = self._catching.memory // (2 if self._exchange else 1)
            budget -= self._targets.moving_size
            chosen = self._targets.caught
            self._waiting = Waiting(chosen, budget, self._catching.replicates, self._catching.place)
        return self._waiting

    def _pass_over(self) -> None:
        self._passed = False
        reason = "earlier steps were still being measured: take a larger `every`"
        self.queue.event(self._step, "unmeasured", {"what": "spectra", "reason": reason})
        if self._exchange is not None:
            # The other ranks wait for what this one says of every chosen step.
            self._beside.submit(Caught(self._step, reason="still at an earlier step"), self._targets)

    def takes(self, key: int, gradient: torch.Tensor) -> None:
        """Copy what a backward gives a leaf."""
        if self._waiting is not None:
            self._waiting.take(key, gradient)

    def ends(self, *, whole: bool, samples: int | None) -> None:
        """Close a replicate."""
        if self._waiting is not None:
            self._waiting.end(whole=whole, samples=self._catching.batch or samples)

    def _collect(self) -> None:
        lone = self.listener.backwards == 1 and not self.listener.in_closure
        if not self._chosen or not self._catching.split or not lone or self._caught is not None:
            return
        self._caught = Caught(self._step)
        begin = time.perf_counter()
        try:
            self._split(self._caught)
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self._caught.reason = f"the microbatch was not split: {error}"
        self._caught.extra_seconds = time.perf_counter() - begin

    def _split(self, caught: Caught) -> None:
        if self._samples is None:
            raise ValueError("watch was given no samples=(loss_fn, batch)")
        model, leaves = self._targets.alone(), self._targets.parameters()
        loss, given = self._samples
        batch = given() if callable(given) else given
        parts = batch_split.split(batch, self._catching.split)
        targets = self._targets.caught
        waiting = Waiting(targets, self._catching.memory, len(parts), self._catching.place)
        samples = samples_of(parts[0])
        keys = {target.name: target.key for target in targets}

        def take(found: dict[str, torch.Tensor]) -> None:
            if waiting.begin():
                for name, gradient in found.items():
                    waiting.take(keys[name], gradient)
                waiting.end(whole=True, samples=samples)

        self._inputs.leave()
        with untouched(model):
            batch_split.differentiate(model, loss, parts, leaves, take)
        self._waiting = waiting
        caught.extra = len(parts)

    def _update_begins(self) -> None:
        if self._chosen and "update" in self._catching.moving:
            for name, parameter in self._targets.moving().items():
                if name not in self._before:
                    self._before[name] = copied(parameter, self._catching.place)

    def _close(self, summary: StepSummary) -> None:
        if not self._chosen:
            return
        self._chosen = False
        self._inputs.leave()
        waiting, split = self._monitor(), self._caught
        caught = waiting.caught(self._step)
        if split is not None:
            caught.extra, caught.extra_seconds = split.extra, split.extra_seconds
            caught.reason = split.reason
        # What was split by us was not scaled.
        caught.scale = None if caught.extra else summary.scale
        caught.skipped = summary.skipped
        if self.listener.in_closure:
            caught.reason = (
                "the optimizer evaluates a closure several times: its gradients are not all of one point"
            )
        if not caught.reason and not caught.samples:
            caught.reason = (
                "no backward gave gradients that hooks of parameters see; torch.autograd.grad and "
                "torch.func give none"
            )
        self._singles(caught)
        caught.arrivals = arrivals(target.device for target in self._targets.caught)
        if waiting.broken:
            self.queue.event(self._step, "spectra_broken", {"backwards": waiting.broken})
        self._waiting, self._caught, self._before = None, None, {}
        self._size = max(self._size, caught.size)
        self._beside.submit(caught, self._targets)

    def _singles(self, caught: Caught) -> None:
        moving = self._targets.moving()
        caught.before, self._before = self._before, {}
        for name, parameter in moving.items():
            caught.weights[name] = copied(parameter, self._catching.place)
            if "momentum" in self._catching.moving:
                state = self._targets.momentum(parameter)
                if state is not None:
                    caught.momenta[name] = copied(state, self._catching.place)
