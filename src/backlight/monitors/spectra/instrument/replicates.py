"""Replicates of the gradient in a live run: the microbatches of chosen steps, measured on a worker thread.

On the step's path gradients are copied and nothing else; a worker thread decomposes them. A step that comes
while earlier ones fill the memory is skipped, so that memory and cost stay bounded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backlight.capture.microbatches import InputSizes, Microbatches
from backlight.capture.model_state import untouched
from backlight.devices import record_events
from backlight.monitor import Gradients, Monitor, RunContext
from backlight.monitors.spectra.instrument import batch_split
from backlight.monitors.spectra.instrument.batches import samples as samples_of
from backlight.monitors.spectra.instrument.layer_selection import Targets, selected
from backlight.monitors.spectra.instrument.rank_exchange import Exchange
from backlight.monitors.spectra.instrument.replicate_buffer import Caught, Waiting, copied
from backlight.monitors.spectra.instrument.worker_thread import WorkerThread
from backlight.monitors.spectra.model.options import EVERY, Catching

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backlight.capture.parameters import ParameterTable
    from backlight.capture.steps import StepSummary
    from backlight.session.step_recorder import StepRecord

_ASSUMED_MICROBATCHES = 8
"""Microbatches that memory is planned for before a step was observed."""


class ReplicateMonitor(Monitor):
    """Collects the replicates of a run; a :class:`backlight.capture.microbatches.GradientSink`.

    See ``docs/formulas.md``, section 2.
    """

    name = "spectra"

    def __init__(self, catching: Catching, every: int | None) -> None:
        self._catching = catching
        self._every = catching.every or every or EVERY
        self.uses_samples = catching.split > 0

    def check_models(self, models: Sequence[nn.Module], table: ParameterTable) -> None:
        """Refuse patterns that match no layer."""
        if models:
            selected(self._catching, table)

    # Life

    def attach(self, run: RunContext) -> None:
        """Start the worker thread, and listen to backward passes."""
        self._run, self._notifier, self._recorder = run, run.notifier, run.recorder
        self._inputs = InputSizes()
        self._targets = Targets(self._catching, run.scope, run.recorder, run.notifier)
        self._exchange = self._open_exchange() if self._catching.exchange else None
        self._worker = WorkerThread(self._catching, run.recorder, run.notifier, self._exchange)
        self._waiting: Waiting | None = None
        self._caught: Caught | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._step = -1
        self._chosen = self._skipped = False
        self._expected = _ASSUMED_MICROBATCHES
        self._size = 0
        self._microbatches = Microbatches(self)
        self._worker.start()
        # The step tracker is in the hub already: it ends the step before, and only then a backward is
        # counted.
        run.listen(self._microbatches)

    def detach(self, error: BaseException | None) -> None:
        """Remove all hooks, and wait for the last step; not for long where the training run failed."""
        self._chosen = False
        self._microbatches.remove_hooks()
        self._inputs.leave()
        self._waiting, self._before = None, {}
        self._worker.stop(10.0 if error is not None else self._catching.patience)

    def _open_exchange(self) -> Exchange | None:
        try:
            return Exchange.open(self._catching.patience)
        except Exception as error:  # noqa: BLE001 - each rank alone is still worth measuring
            self._notifier.trouble(error, "spectra over the replicates of all ranks")
            return None

    # Steps

    def on_step_start(self, step: int) -> None:
        """Decide whether the microbatches of this step are collected."""
        self._expected = self._microbatches.backwards or self._expected
        self._microbatches.restart()
        self._inputs.leave()
        self._waiting, self._caught, self._before = None, None, {}
        self._step, self._skipped = step, False
        self._chosen = step % self._every == 0
        if not self._chosen:
            return
        self._skipped = self._worker.busy(self._size)
        if self._skipped:
            self._chosen = False
            return
        self._targets.look()
        self._inputs.follow(self._targets.roots())

    def wants_step(self, step: int) -> bool:
        """Return whether the step was chosen."""
        return self._chosen

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Split the batch of a lone microbatch, with the weights before the step."""
        lone = self._microbatches.backwards == 1 and not self._microbatches.in_closure
        if not self._chosen or not self._catching.split or not lone or self._caught is not None:
            return
        self._caught = Caught(self._step)
        begin = time.perf_counter()
        try:
            self._split(self._caught)
        except Exception as error:  # noqa: BLE001 - recorded as the reason why this step has no replicates
            self._caught.reason = f"the microbatch was not split: {error}"
        self._caught.extra_seconds = time.perf_counter() - begin

    def on_before_optimizer_step(self, parameters: Sequence[torch.Tensor], record: StepRecord) -> None:
        """Keep the weights before the step, for what it adds."""
        if self._chosen and "update" in self._catching.moving:
            for name, parameter in self._targets.moving().items():
                if name not in self._before:
                    self._before[name] = copied(parameter, self._catching.place)

    def on_step_end(self, summary: StepSummary, record: StepRecord) -> None:
        """Hand a chosen step over to the worker thread."""
        if not self._chosen:
            return
        self._chosen = False
        self._inputs.leave()
        waiting, split = self._buffer(), self._caught
        caught = waiting.caught(self._step)
        if split is not None:
            caught.extra, caught.extra_seconds = split.extra, split.extra_seconds
            caught.reason = split.reason
        # The passes of a split have no gradient scaler.
        caught.scale = None if caught.extra else summary.scale
        caught.skipped = summary.skipped
        if self._microbatches.in_closure:
            caught.reason = (
                "the optimizer evaluates a closure several times: its gradients are not all of one point"
            )
        if not caught.reason and not caught.samples:
            caught.reason = (
                "no backward gave gradients that hooks of parameters see; torch.autograd.grad and "
                "torch.func give none"
            )
        self._add_singles(caught)
        caught.arrivals = record_events(target.device for target in self._targets.caught)
        if waiting.broken:
            self._recorder.event(self._step, "spectra_broken", {"backwards": waiting.broken})
        self._waiting, self._caught, self._before = None, None, {}
        self._size = max(self._size, caught.size)
        self._worker.submit(caught, self._targets)

    # Gradients of single backward passes

    def leaves(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Return the leaves to hook for the backward that begins."""
        if self._skipped:
            self._record_skip()
        if not self._chosen:
            return ()
        return self._targets.leaves() if self._buffer().begin() else ()

    def takes(self, key: int, gradient: torch.Tensor) -> None:
        """Copy what a backward gives a leaf."""
        if self._waiting is not None:
            self._waiting.take(key, gradient)

    def ends(self, *, whole: bool, samples: int | None) -> None:
        """Close a replicate."""
        if self._waiting is not None:
            self._waiting.end(whole=whole, samples=self._catching.batch or samples)

    def trouble(self, error: Exception) -> None:
        """Detach after an error inside a hook of a parameter."""
        self._run.disable(error)

    def _buffer(self) -> Waiting:
        """Return the buffer for the gradients of this step, for the parameters of the model as it is now."""
        if self._waiting is None:
            self._targets.refresh(self._expected, spread_over=self._exchange)
            budget = self._catching.memory // (2 if self._exchange else 1)
            budget -= self._targets.moving_size
            chosen = self._targets.caught
            self._waiting = Waiting(chosen, budget, self._catching.replicates, self._catching.place)
        return self._waiting

    def _record_skip(self) -> None:
        self._skipped = False
        reason = "earlier steps were still being measured: take a larger `every`"
        self._recorder.event(self._step, "unmeasured", {"what": "spectra", "reason": reason})
        if self._exchange is not None:
            # The other ranks wait for this one's part of every chosen step.
            self._worker.submit(Caught(self._step, reason="still at an earlier step"), self._targets)

    def _split(self, caught: Caught) -> None:
        if self._run.samples is None:
            raise ValueError("watch was given no samples=(loss_fn, batch)")
        model, leaves = self._targets.alone(), self._targets.parameters()
        loss, given = self._run.samples
        batch: Any = given() if callable(given) else given
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

    def _add_singles(self, caught: Caught) -> None:
        moving = self._targets.moving()
        caught.before, self._before = self._before, {}
        for name, parameter in moving.items():
            caught.weights[name] = copied(parameter, self._catching.place)
            if "momentum" in self._catching.moving:
                state = self._targets.momentum(parameter)
                if state is not None:
                    caught.momenta[name] = copied(state, self._catching.place)
