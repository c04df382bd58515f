"""The grokking monitor in a watched training: gradients and per-sample geometry at its logged steps.

Everything that is measured is put into a queue, which the thread that writes empties: the training
never waits for the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.gather import full, gathered, spread
from backlight.capture.parameters import local
from backlight.monitors.grokking.instrument.probe_batch import Probe
from backlight.monitors.grokking.instrument.tracker import Tracker
from backlight.monitors.grokking.model.disk_guard import DiskWatch
from backlight.processes import available_memory
from backlight.store.write.queue import Queue

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable
    from backlight.monitors.grokking.model.measures import Measures
    from backlight.notifier import Notifier

LOGGED_EVERY = 10
"""Steps between two logged steps where nothing else is asked for."""

DISK_FREE = 1_000_000_000
"""Bytes that the disk is to have free; below, less is kept."""

WINDOW_SHARE = 0.1
"""Share of the free memory that the window of past gradients may take."""

IN_PART = (
    "a sharded gradient is on this rank in part only; it is not stored. measures={'gather': True} gathers "
    "it, on every rank"
)
"""What is said of a gradient that is spread over processes."""

Samples = tuple[Callable[[Any, Any], torch.Tensor], Any]


def check_samples(samples: Any, models: Sequence[Any]) -> None:
    """Refuse samples that cannot be measured.

    Raises
    ------
    ValueError
        If they are no pair of a loss function and a batch, or no single model is given.
    """
    if not isinstance(samples, tuple) or len(samples) != 2 or not callable(samples[0]):
        raise ValueError(
            "watch: samples must be (loss_fn, batch): loss_fn(model, batch) returns the loss summed over "
            "the samples, batch is a fixed probe batch or a callable that gives one; got "
            f"{type(samples).__name__}"
        )
    if len(models) != 1:
        raise ValueError(
            f"watch: samples are of one model, got {len(models)}; call watch(model, optimizer, ...)"
        )


def first_real(batch: Any) -> torch.Tensor | None:
    """Return the first tensor of a batch where it is real-valued with two dimensions or more."""
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    real = isinstance(first, torch.Tensor) and first.is_floating_point() and first.dim() > 1
    return first if real else None


class Geometry:
    """What the monitor measures of one watched training.

    Parameters
    ----------
    measures, samples:
        What is measured, and of what batch; see :func:`backlight.watch`.
    models:
        The watched models.
    path, notifier:
        The run directory, and what tells the user.
    """

    def __init__(
        self,
        measures: Measures,
        samples: Samples | None,
        models: Sequence[Any],
        path: Path,
        notifier: Notifier,
    ) -> None:
        self.queue = Queue()
        self._notifier = notifier
        self._sampled = -1
        self._sampled_model = models[0] if samples is not None else None
        self._asked = measures.logged_every(LOGGED_EVERY)
        self._told: set[str] = set()
        probe = None
        if samples is not None:
            probe = Probe(models[0], samples[0], samples[1], first_real)
        self._tracker = Tracker(measures.logged_every(LOGGED_EVERY), self.queue, probe, self._warn)
        self._disk = DiskWatch(path, DISK_FREE, self.queue)
        if probe is None and measures.sampled:
            reason = "watch was given no samples=(loss_fn, batch): no per-sample gradients are measured"
            self.queue.event(None, "unmeasured", {"what": "gram", "reason": reason})

    def wants(self, step: int) -> bool:
        """Tell whether ``step`` is a logged one."""
        return self._tracker.wants(step)

    def collect(
        self, step: int, table: ParameterTable, parameters: Sequence[torch.Tensor], scale: Any
    ) -> None:
        """Take gradients as backward left them, and measure the samples with the weights before the step."""
        if not self.wants(step):
            return
        if self._sampled < 0:
            self._bound_window(table)
        gradients = []
        for parameter in parameters:
            row, gradient = table.row(parameter), parameter.grad
            if row is None or gradient is None:
                continue
            if local(gradient) is not gradient:
                if not self._asked.gather:
                    self._warn("gradient", IN_PART)
                    continue
                gradient = full(gradient)
            gradients.append((table.records[row].name, gradient if scale is None else gradient / scale))
        self._tracker.gradients(step, gradients)
        if self._sampled != step:
            self._sampled = step
            self._tracker.measures = self._disk.look(step, self._tracker.measures)
            self._sample(step)

    def close(self, step: int) -> None:
        """Measure what the gradients of a finished step allow."""
        if self.wants(step):
            self._tracker.close(step)

    def _sample(self, step: int) -> None:
        # Clipping and some optimizers call with gradients off.
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            # By what was asked for, not by what the disk of this rank still allows: all ranks do the same.
            model = self._sampled_model if self._asked.gather and self._asked.samples_at(step) else None
            if model is not None and spread(model):
                stack.enter_context(gathered(model))
            self._tracker.sample(step)

    def _bound_window(self, table: ParameterTable) -> None:
        held = sum(record.numel for record in table.records) * 4 * self._tracker.measures.window_steps
        if self._tracker.measures.window and held > WINDOW_SHARE * available_memory():
            self._tracker.without_window()
            reason = f"{held} bytes of past gradients would not fit into a tenth of the free memory"
            self.queue.event(None, "unmeasured", {"what": "window", "reason": reason})

    def _warn(self, what: str, reason: str) -> None:
        # That the model is called with the first tensor alone is a guess: where it fails, an event says so.
        if what != "agop" and what not in self._told:
            self._told.add(what)
            self._notifier.warn(f"grokking {what}", f"{what} is not measured at some steps: {reason}")
