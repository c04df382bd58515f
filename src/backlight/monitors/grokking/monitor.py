"""Gradients, their products and per-sample geometry at the logged steps of a live run."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch

from backlight.capture.model_state import full, gathered, spread
from backlight.capture.parameters import local
from backlight.extras import require
from backlight.monitor import Gradients, Monitor, RunHandle
from backlight.monitors.grokking.model.measures import DiskGuard
from backlight.monitors.grokking.settings import Measures
from backlight.processes import available_memory

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable
    from backlight.capture.step_summary import StepSummary
    from backlight.session.settings import Settings
    from backlight.session.step_recorder import StepRecord

LOG_SPACING = 10
"""Steps between two logged steps by default."""

MIN_FREE_DISK_BYTES = 1_000_000_000
"""With less free space on the disk, less is kept."""

WINDOW_SHARE = 0.1
"""Share of the free memory that the window of past gradients may take."""

SHARDED = (
    "a sharded gradient is on this rank in part only; it is not stored. grokking={'gather': True} gathers "
    "it, on every rank"
)
"""Why a gradient that is spread over processes is not stored."""


class GrokkingMonitor(Monitor):
    """Measures gradient geometry at logged steps; see ``docs/formulas.md``, sections 3 and 4."""

    name = "grokking"
    records = "gradient geometry"
    uses_samples = True
    samples_for = "the monitor grokking"

    def __init__(self, measures: Measures) -> None:
        self._measures = measures.logged_every(LOG_SPACING)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor with ``measures`` of the settings."""
        if "grokking" not in settings.monitors:
            return None
        require("h5py", what="the monitor grokking")
        return cls(Measures.of(settings))

    def attach(self, run: RunHandle) -> None:
        """Prepare the probe batch; nothing is measured before the first logged step."""
        # Here, since they import much that the other monitors do not need.
        from backlight.monitors.grokking.instrument.probe_batch import ProbedModel  # noqa: PLC0415
        from backlight.monitors.grokking.instrument.tracker import MeasureTracker  # noqa: PLC0415

        self._recorder, self._notifier = run.recorder, run.notifier
        self._sampled_step = -1
        self._warned: set[str] = set()
        self._sampled_model = weakref.ref(run.scope.models[0]) if run.samples is not None else None
        probe = None
        if run.samples is not None:
            loss_fn, batch, *held_out = run.samples
            probe = ProbedModel(
                run.scope.models[0], loss_fn, batch, first_real,
                held_out=held_out[0] if held_out else None, optimizers=run.scope.optimizers,
            )  # fmt: skip
        self._tracker = MeasureTracker(self._measures, run.recorder, probe, self._warn)
        self._disk = DiskGuard(
            run.path,
            MIN_FREE_DISK_BYTES,
            run.recorder,
            lambda text: self._notifier.warn("grokking disk", text),
        )
        if probe is None and self._measures.sampled:
            reason = "watch was given no samples=(loss_fn, batch): no per-sample gradients are measured"
            run.recorder.event(None, "unmeasured", {"what": "gram", "reason": reason})

    def wants_step(self, step: int) -> bool:
        """Return whether ``step`` is a logged one."""
        return self._tracker.measures.logs(step)

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Take gradients as backward left them, and measure the samples with the weights before the step."""
        step = record.step
        if not self.wants_step(step):
            return
        if self._sampled_step < 0:
            self._bound_window(gradients.table)
        taken = []
        for row, parameter in zip(gradients.rows, gradients.parameters, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if local(gradient) is not gradient:
                if not self._measures.gather:
                    self._warn("gradient", SHARDED)
                    continue
                gradient = full(gradient)
            name = gradients.table.records[row].name
            taken.append((name, gradient if gradients.scale is None else gradient / gradients.scale))
        self._tracker.gradients(step, taken)
        if self._sampled_step != step:
            self._sampled_step = step
            self._tracker.measures = self._disk.cheaper_if_full(step, self._tracker.measures)
            self._sample(step)

    def on_step_end(self, summary: StepSummary, record: StepRecord) -> None:
        """Measure what the gradients of a finished step allow."""
        if self.wants_step(record.step):
            self._tracker.close(record.step)

    def _sample(self, step: int) -> None:
        # Clipping and some optimizers call with gradients off.
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            # By what was requested, not by what the disk of this rank still allows: all ranks do the same.
            wanted = self._measures.gather and self._measures.samples_at(step)
            model = None if self._sampled_model is None else self._sampled_model()
            if model is not None and wanted and spread(model):
                stack.enter_context(gathered(model))
            self._tracker.sample(step)

    def _bound_window(self, table: ParameterTable) -> None:
        window_bytes = sum(record.numel for record in table.records) * 4 * self._tracker.measures.window_steps
        if self._tracker.measures.window and window_bytes > WINDOW_SHARE * available_memory():
            self._tracker.without_window()
            reason = f"{window_bytes} bytes of past gradients would not fit into a tenth of the free memory"
            self._recorder.event(None, "unmeasured", {"what": "window", "reason": reason})

    def _warn(self, what: str, reason: str) -> None:
        # That the model is called with the first tensor alone is a guess: where it fails, an event records
        # it.
        if what != "agop" and what not in self._warned:
            self._warned.add(what)
            self._notifier.warn(f"grokking {what}", f"{what} is not measured at some steps: {reason}")


def first_real(batch: Any) -> torch.Tensor | None:
    """Return the first tensor of a batch where it is real-valued with two dimensions or more."""
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    real = isinstance(first, torch.Tensor) and first.is_floating_point() and first.dim() > 1
    return first if real else None
