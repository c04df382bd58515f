"""Replicates of the gradient in a live run: the microbatches of chosen steps, measured on a worker thread.

On the step's path gradients are copied and nothing else; a worker thread decomposes them. A step that comes
while earlier ones fill the memory is skipped, so that memory and cost stay bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backlight import clock
from backlight.capture.batches import samples as samples_of
from backlight.capture.batches import split
from backlight.capture.microbatches import Microbatches
from backlight.capture.model_state import preserve_state
from backlight.devices import record_events
from backlight.interrupts import is_interrupt
from backlight.monitor import Gradients, Monitor, RunHandle
from backlight.monitors.spectra.instrument.layer_selection import LayerSelection, select
from backlight.monitors.spectra.instrument.rank_group import RankGroup, new_group
from backlight.monitors.spectra.instrument.replicate_buffer import (
    CapturedStep,
    ReplicateBuffer,
    copied,
)
from backlight.monitors.spectra.instrument.replicate_gradient import differentiate
from backlight.monitors.spectra.instrument.worker_thread import WorkerThread
from backlight.monitors.spectra.settings import EVERY_STEPS, SpectraSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backlight.capture.parameters import ParameterTable
    from backlight.capture.step_summary import StepSummary
    from backlight.session.step_recorder import StepRecord

_ASSUMED_MICROBATCHES = 8
"""Microbatches that memory is planned for before a step was observed."""


class ReplicateMonitor(Monitor):
    """Collects the replicates of a run; a :class:`backlight.capture.microbatches.GradientSink`.

    See ``docs/formulas.md``, section 2.
    """

    name = "spectra"
    after = ("stalls",)  # a wait for its thread at the end is no stall
    samples_for = "spectra={'split': R}"

    def __init__(self, options: SpectraSettings, every: int | None) -> None:
        self._options = options
        self._every = options.every or every or EVERY_STEPS
        self.uses_samples = options.split > 0
        self.needs_samples = f"spectra.split={options.split}" if options.split else ""

    def check_models(self, models: Sequence[nn.Module], table: ParameterTable) -> None:
        """Refuse patterns that match no layer."""
        if models:
            select(self._options, table)

    # Life

    def attach(self, run: RunHandle) -> None:
        """Start the worker thread, and listen to backward passes."""
        self._run, self._notifier, self._recorder = run, run.notifier, run.recorder
        self._selection = LayerSelection(self._options, run.scope, run.recorder, run.notifier)
        self._group = self._open_group() if self._options.exchange else None
        self._worker = WorkerThread(self._options, run.recorder, run.notifier, self._group)
        self._replicates: ReplicateBuffer | None = None
        self._captured: CapturedStep | None = None
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
        run.follow_forwards()

    def detach(self, error: BaseException | None) -> None:
        """Remove all hooks, and wait for the last step; not for long where the training run failed."""
        self._chosen = False
        self._microbatches.remove_hooks()
        self._replicates, self._before = None, {}
        self._worker.stop(10.0 if error is not None else self._options.timeout)

    def _open_group(self) -> RankGroup | None:
        try:
            return new_group(self._options.timeout)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._notifier.trouble(error, "spectra over the replicates of all ranks")
            return None

    # Steps

    def on_step_start(self, step: int) -> None:
        """Decide whether the microbatches of this step are collected."""
        self._expected = self._microbatches.backwards or self._expected
        self._microbatches.restart()
        self._replicates, self._captured, self._before = None, None, {}
        self._step, self._skipped = step, False
        self._chosen = step % self._every == 0
        if not self._chosen:
            return
        self._skipped = self._worker.busy(self._size)
        if self._skipped:
            self._chosen = False
            return
        self._selection.ensure_table()

    def wants_step(self, step: int) -> bool:
        """Return whether the step was chosen."""
        return self._chosen

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Split the batch of a single microbatch, with the weights before the step."""
        single = self._microbatches.backwards == 1 and not self._microbatches.in_closure
        if not self._chosen or not self._options.split or not single or self._captured is not None:
            return
        self._captured = CapturedStep(self._step)
        begin = clock.perf_counter()
        try:
            self._split(self._captured)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._captured.reason = f"the microbatch was not split: {error}"
        self._captured.extra_seconds = clock.perf_counter() - begin

    def on_before_optimizer_step(self, parameters: Sequence[torch.Tensor], record: StepRecord) -> None:
        """Keep the weights before the step, for what it adds."""
        if self._chosen and "update" in self._options.states:
            for name, parameter in self._selection.weights().items():
                if name not in self._before:
                    self._before[name] = copied(parameter, self._options.buffer)

    def on_step_end(self, summary: StepSummary, record: StepRecord) -> None:
        """Hand a chosen step over to the worker thread."""
        if not self._chosen:
            return
        self._chosen = False
        replicates, split = self._buffer(), self._captured
        captured = replicates.captured(self._step)
        if split is not None:
            captured.extra_passes, captured.extra_seconds = split.extra_passes, split.extra_seconds
            captured.reason = split.reason
        # The passes of a split have no gradient scaler.
        captured.scale = None if captured.extra_passes else summary.scale
        captured.skipped = summary.skipped
        if self._microbatches.in_closure:
            captured.reason = (
                "the optimizer evaluates a closure several times: its gradients are not all of one point"
            )
        if not captured.reason and not captured.samples:
            captured.reason = (
                "no backward gave gradients that hooks of parameters see; torch.autograd.grad and torch.func "
                "give none"
            )
        self._add_states(captured)
        captured.copies_done = record_events(target.device for target in self._selection.captured)
        if replicates.failed:
            self._recorder.event(self._step, "spectra_backward_failed", {"backwards": replicates.failed})
        self._replicates, self._captured, self._before = None, None, {}
        self._size = max(self._size, captured.size)
        self._worker.submit(captured, self._selection)

    # Gradients of single backward passes

    def leaves(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Return the leaves to hook for the backward that begins."""
        if self._skipped:
            self._record_skip()
        if not self._chosen:
            return ()
        return self._selection.leaves() if self._buffer().begin() else ()

    def takes(self, key: int, gradient: torch.Tensor) -> None:
        """Copy what a backward gives a leaf."""
        if self._replicates is not None:
            self._replicates.add(key, gradient)

    def ends(self, *, whole: bool, samples: int | None) -> None:
        """Close a replicate."""
        if self._replicates is not None:
            self._replicates.end(complete=whole, samples=self._options.batch or samples)

    def trouble(self, error: Exception) -> None:
        """Detach after an error inside a hook of a parameter."""
        self._run.disable(error)

    def _buffer(self) -> ReplicateBuffer:
        """Return the buffer for the gradients of this step, for the parameters of the model as it is now."""
        if self._replicates is None:
            self._selection.refresh(self._expected, group=self._group)
            budget = self._options.memory // (2 if self._group else 1)
            budget -= self._selection.states_size
            chosen = self._selection.captured
            self._replicates = ReplicateBuffer(chosen, budget, self._options.replicates, self._options.buffer)
        return self._replicates

    def _record_skip(self) -> None:
        self._skipped = False
        reason = "earlier steps were still being measured: take a larger `every`"
        self._recorder.event(self._step, "unmeasured", {"what": "spectra", "reason": reason})
        if self._group is not None:
            # The other ranks wait for this one's part of every chosen step.
            self._worker.submit(CapturedStep(self._step, reason="still at an earlier step"), self._selection)

    def _split(self, captured: CapturedStep) -> None:
        if self._run.samples is None:
            raise ValueError("watch was given no samples=(loss_fn, batch)")
        model, leaves = self._selection.unwrapped_model(), self._selection.parameters()
        loss, batch_source = self._run.samples[:2]
        batch: Any = batch_source() if callable(batch_source) else batch_source
        parts = split(batch, self._options.split)
        targets = self._selection.captured
        replicates = ReplicateBuffer(targets, self._options.memory, len(parts), self._options.buffer)
        samples = samples_of(parts[0])
        keys = {target.name: target.key for target in targets}

        def add(gradients: dict[str, torch.Tensor]) -> None:
            if replicates.begin():
                for name, gradient in gradients.items():
                    replicates.add(keys[name], gradient)
                replicates.end(complete=True, samples=samples)

        with preserve_state(model):
            differentiate(model, loss, parts, leaves, add)
        self._replicates = replicates
        captured.extra_passes = len(parts)

    def _add_states(self, captured: CapturedStep) -> None:
        weights = self._selection.weights()
        captured.before, self._before = self._before, {}
        for name, parameter in weights.items():
            captured.weights[name] = copied(parameter, self._options.buffer)
            if "momentum" in self._options.states:
                state = self._selection.momentum(parameter)
                if state is not None:
                    captured.momenta[name] = copied(state, self._options.buffer)
