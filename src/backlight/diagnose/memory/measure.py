"""Measure the memory of a script's steps: run it unchanged, record some steps, end it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from backlight import devices
from backlight.capture.hub import HUB
from backlight.capture.modules import live_objects
from backlight.capture.step_summary import StepSummary
from backlight.diagnose.memory.recorder import LogitsTracker, MemoryRecorder, OperationCounter
from backlight.diagnose.memory.result import (
    GRANULE_BYTES,
    Account,
    AllocatorStatistics,
    MeasuredMemory,
    account_fields,
)
from backlight.diagnose.script_observer import StepObserver
from backlight.launch.observe import end_script, explain
from backlight.launch.script import NoTrainingError
from backlight.monitors.steptime.instrument.kept_tensors import KeptDataTracker, KeptGraphTracker
from backlight.records import Phase

MAX_FURTHER_STEPS = 40
"""Steps after the recorded ones that show whether graphs or tensors of earlier steps are kept."""


def measure_memory(
    script: str, arguments: list[str], *, module: bool, warmup: int, steps: int, quiet: bool = False
) -> MeasuredMemory:
    """Run a script, end it after ``warmup`` and ``steps`` steps, and return the memory of the latter."""
    observer = MemoryObserver(end_script, warmup, steps)
    code = explain(observer, script, arguments, module=module, quiet=quiet)
    recorder = observer.recorder
    if recorder is None or not observer.recorded:
        what = f"after {observer.seen} of the {warmup + 1} steps that are needed (--warmup {warmup})"
        if not observer.seen:
            what = "without a step of an optimizer after a backward; expected a training script"
            if not module and "def build_model" in Path(script).read_text(encoding="utf-8", errors="replace"):
                what += f". It looks like a recipe: backlight memory predict {script}"
        also = f"; {'; '.join(observer.trouble)}" if observer.trouble else ""
        raise NoTrainingError(f"{script}: ended (exit code {code}) {what}{also}", code)
    granule = GRANULE_BYTES if devices.is_accelerator(recorder.device) else 1
    parameters = {id(p): p for model in observer.forwards.models for p in model.parameters()}
    return MeasuredMemory(
        **account_fields(Account(recorder.log, recorder.start, granule)),
        exit_code=code,
        steps=observer.recorded,
        warmup=warmup,
        device=recorder.device,
        parameters=sum(p.numel() for p in parameters.values()),
        flops=observer.counter.flops(),
        logits=observer.logits.find(recorder.start, granule) if observer.logits is not None else None,
        workspaces=observer.counter.workspaces(),
        allocator=observer.allocator,
        trouble=tuple(observer.trouble),
        kept_graphs=observer.kept_graphs,
        kept_data=observer.kept_data,
    )


class MemoryObserver(StepObserver):
    """Records the memory of ``steps`` of a script after ``warmup`` ones, then ends it with ``stop``.

    ``recorder`` and ``logits`` are None if the script ended before; ``recorded`` counts steps that were
    recorded to their end, ``seen`` all steps. Where graphs of earlier steps are alive then, or a container
    grows, the script goes on until it is certain that they are kept (``kept_graphs``, ``kept_data``) or not.
    """

    def __init__(self, stop: Callable[[], None], warmup: int, steps: int) -> None:
        super().__init__(stop)
        self.recorder: MemoryRecorder | None = None
        self.counter = OperationCounter()
        self.logits: LogitsTracker | None = None
        self.allocator: AllocatorStatistics | None = None
        self.recorded = self.seen = 0
        self._warmup, self._steps = warmup, steps
        self._is_recording = False
        self.kept_graphs: dict[str, Any] | None = None
        self.kept_data: dict[str, Any] | None = None
        self._data_tracker = KeptDataTracker(
            self._keep_data, itertools.count(1), at_least=1, reads_always=True
        )
        self._tracker = KeptGraphTracker(self._keep)
        HUB.add(self._tracker.marks, self.dropped)

    def _keep(self, facts: dict[str, Any], step: int) -> None:
        self.kept_graphs = {**facts, "step": step}

    def _keep_data(self, facts: dict[str, Any], step: int) -> None:
        self.kept_data = {**facts, "step": step} if facts["holder"] else None

    def on_finish(self) -> None:
        """Stop recording."""
        self._end()
        HUB.remove(self._tracker.marks)

    def phase_changed(self, phase: Phase) -> None:
        """Begin a phase of the step."""
        if self._is_recording and self.recorder is not None:
            self.recorder.begin_phase(phase)

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the state that an optimizer's step has allocated."""
        if self._is_recording and self.recorder is not None:
            self.recorder.register_optimizer(optimizer)
        super().optimizer_end(optimizer)

    def step_closes(self, summary: StepSummary) -> None:
        """Begin to record after the warm-up, and end the script after the recorded steps."""
        self.seen += 1
        self._tracker.end_step()
        self._data_tracker.read(self.seen)
        is_suspicious = (self._tracker.marks.kept() is not None and self.kept_graphs is None) or (
            self._data_tracker.is_growing and self.kept_data is None
        )
        self._tracker.marks.step = self.seen
        if self._is_recording:
            self.recorded += 1
            if self.recorded == self._steps:
                self._end()
        if self.recorded >= self._steps:
            if not is_suspicious or self.seen >= self._warmup + self._steps + MAX_FURTHER_STEPS:
                self._stop()
        elif self.seen == self._warmup and self.recorder is None:
            self._begin()

    def _begin(self) -> None:
        self.recorder = MemoryRecorder(self.forwards.models, self.counter, _main_device(self.forwards.models))
        self.logits = LogitsTracker(self.recorder)
        self.counter.on_softmax = self.logits.on_softmax
        if devices.is_in_use():
            devices.reset_peak_memory()
        self.recorder.__enter__()
        self._is_recording = True
        for optimizer in self.scope.optimizers():
            self.recorder.register_optimizer(optimizer)
        self.recorder.register_held(live_objects(torch.Tensor))
        self.recorder.begin_steps()
        self.recorder.begin_phase(Phase.OTHER)

    def _end(self) -> None:
        if not self._is_recording or self.recorder is None:
            return
        self._is_recording = False
        if _get_current_dispatch_mode() is self.recorder:
            self.recorder.__exit__(None, None, None)
        elif not self.recorder.trouble:
            # The script has entered a mode of its own around the end of the step, and will leave it.
            self.recorder.trouble = "the script's own dispatch mode is active above the recorder"
        self.allocator = read_allocator()
        if self.recorder.trouble:
            self.trouble.append(self.recorder.trouble)


def read_allocator() -> AllocatorStatistics | None:
    """Return the statistics of the current device's allocator; None where no accelerator is in use."""
    if not devices.is_in_use():
        return None
    stats = devices.allocator_statistics()
    return AllocatorStatistics(
        allocated_peak=int(stats.get("allocated_bytes.all.peak", 0)),
        reserved_peak=int(stats.get("reserved_bytes.all.peak", 0)),
        inactive_split=int(stats.get("inactive_split_bytes.all.current", 0)),
        retries=int(stats.get("num_alloc_retries", 0)),
        failures=int(stats.get("num_ooms", 0)),
    )


def _main_device(models: Sequence[nn.Module]) -> str:
    """Return the type of the device that holds most of the parameters."""
    sizes: Counter[str] = Counter()
    for model in models:
        for parameter in model.parameters():
            sizes[parameter.device.type] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else "cpu"
