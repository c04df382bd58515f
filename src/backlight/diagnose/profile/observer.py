"""Observe a script for a profile: some steps with the clock alone, then a few with torch's profiler.

The times of steps come from the clocked ones, in which the stack is sampled too; the shares of operations and
modules come from the traced ones, whose overhead is known from both.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from backlight import devices
from backlight.capture.fingerprint import take_fingerprint
from backlight.capture.hub import HUB, Listener
from backlight.capture.modules import is_compiled
from backlight.capture.step_summary import StepSummary
from backlight.devices import is_capturing_graph, timing_event
from backlight.diagnose.profile.line_samples import LineSampler
from backlight.diagnose.profile.optimizations import LiveObjects, read_live_objects
from backlight.diagnose.profile.ranges import (
    LineRanges,
    ModuleRanges,
    PhaseRanges,
    has_compiled,
    lines_possible,
)
from backlight.diagnose.profile.step_summary import StepTime
from backlight.diagnose.script_observer import StepObserver
from backlight.distributed import world
from backlight.monitors.steptime.instrument.runtime_info import CoreWait, optimizer_groups, runtime_info
from backlight.monitors.steptime.model.step_times import WINDOW_STEPS, find_steady
from backlight.records import Fingerprint, ParameterRecord, Phase

MAX_PENDING_STEPS = 64
"""Steps that may wait to be read; older ones are dropped and counted."""


class DeviceEvent(Protocol):
    """The used part of :class:`torch.Event`."""

    def record(self) -> None:
        """Record the event in the current stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds from this event to a later one."""


class DevicePhases(Listener):
    """Marks phases in the current stream; ``make`` creates an event.

    ``steps`` are seconds by phase of each step, in order; ``dropped_steps`` counts steps whose events were
    not passed before too many others were pending.
    """

    def __init__(self, make: Callable[[], DeviceEvent] = timing_event) -> None:
        self._make = make
        self._phase = Phase.OTHER
        self._spare: list[DeviceEvent] = []
        self._marks: list[tuple[str, DeviceEvent]] = []
        self._pending: deque[list[tuple[str, DeviceEvent]]] = deque()
        self.steps: list[dict[str, float]] = []
        self.dropped_steps = 0

    def phase_changed(self, phase: Phase) -> None:
        """Mark the boundary, from the end of the first step on."""
        self._phase = phase
        if self._marks:
            self._mark()

    def end_step(self) -> None:
        """End the step: read the steps that have passed, without waiting."""
        if not self._marks:
            self._mark()  # the first boundary of the first step
            return
        self._mark()
        self._pending.append(self._marks)
        # The last event of this step is the first of the next.
        self._marks = [self._marks[-1]]
        while self._pending and self._pending[0][-1][1].query():
            self._read(self._pending.popleft())
        while len(self._pending) > MAX_PENDING_STEPS:
            self.dropped_steps += 1
            self._free(self._pending.popleft())

    def finish(self) -> None:
        """Read the remaining steps; the steps are over, so that waiting for the device is allowed."""
        while self._pending:
            self._pending[0][-1][1].synchronize()
            self._read(self._pending.popleft())

    def _mark(self) -> None:
        if is_capturing_graph():
            return
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        self._marks.append((self._phase, event))

    def _read(self, marks: list[tuple[str, DeviceEvent]]) -> None:
        times: dict[str, float] = {}
        for (phase, begin), (_, end) in pairwise(marks):
            times[phase] = times.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        self.steps.append(times)
        self._free(marks)

    def _free(self, marks: list[tuple[str, DeviceEvent]]) -> None:
        self._spare += [event for _, event in marks[:-1]]


EXTENSION = 4
"""Times as many steps are clocked as requested where no steady part is found in them."""

MIN_EXTENDED_STEPS = 1 + 2 * WINDOW_STEPS
"""Requested steps from which clocking is extended; fewer are taken as they are."""


@dataclass(frozen=True)
class Description:
    """Fingerprint, parameters and runtime info at the end of the clocked steps."""

    fingerprint: Fingerprint
    records: tuple[ParameterRecord, ...]
    runtime_info: dict[str, Any]


@dataclass
class ObservedProfile:
    """Steps and live objects of a script.

    ``traced`` steps are those under the profiler; ``has_lines`` is whether one more follows in the trace,
    with source lines. ``device`` are seconds of the device by phase of the clocked steps from the second on.
    ``live`` are the live objects at the end of the clocked steps, ``description`` what else is there then;
    ``sampler`` has the samples of the clocked steps from the second on; ``optimizers`` are types by number.
    """

    trouble: list[str]
    steps: list[StepTime] = field(default_factory=list)
    traced: list[StepTime] = field(default_factory=list)
    has_lines: bool = False
    device: list[dict[str, float]] = field(default_factory=list)
    live: LiveObjects | None = None
    description: Description | None = None
    sampler: LineSampler | None = None
    optimizers: dict[int, str] = field(default_factory=dict)


class ProfileObserver(StepObserver):
    """Clocks and traces steps of a script, then ends it with ``stop``.

    ``steps`` under the clock include the cold first one; ``traced`` ones under the profiler follow. The trace
    goes to the path ``trace``; without one these steps run without a profiler, as on ranks other than the
    first. ``stacks`` records the stack of every operation instead of lines in one additional step.
    """

    def __init__(
        self,
        stop: Callable[[], None],
        steps: int,
        traced: int,
        trace: Path | None,
        *,
        stacks: bool = False,
        arguments: tuple[str, ...] = (),
    ) -> None:
        super().__init__(stop)
        self.observed = ObservedProfile(self.trouble)
        self._steps = steps
        self._wanted = traced
        # Ranks wait for each other: all of them take the same number of steps, and then end.
        self._is_distributed = world().size > 1
        self._total = steps + (traced + 2 if traced else 0) if self._is_distributed else 0
        self._seen = 0
        self._is_over = False
        self._trace = trace
        self._stacks = stacks
        self._arguments = arguments
        self._core_wait = CoreWait()
        self._modules = ModuleRanges()
        self._phases = PhaseRanges()
        self._lines = LineRanges()
        self._wants_lines = self._has_lines = False
        self._profiler: torch.profiler.profile | None = None
        self._skipped_first = False
        self._exported = False
        self._device: DevicePhases | None = None

    def on_finish(self) -> None:
        """Keep what a script that ended early has left."""
        self._end_sampling()
        if self.observed.live is None and self.observed.steps:
            self._read_live_objects()
        self._end_trace()
        self._end_device()

    def step_closes(self, summary: StepSummary) -> None:
        """Count a step, and switch from the clock to the profiler, or end the script."""
        if self._is_over:
            return  # the script is ending
        self._seen += 1
        if self._is_clocking():
            self.observed.steps.append(_step_time(summary))
            if self.observed.sampler is None:
                # Not in the first step: it is cold. On this thread, which is the one that trains.
                self.observed.sampler = LineSampler(lambda: self._clock.phase)
                self.observed.sampler.start()
            self.observed.sampler.step = len(self.observed.steps)
            if len(self.observed.steps) == 1 and devices.is_in_use():
                # Not before: a back-end outside of torch is loaded by the script.
                self._device = DevicePhases()
                HUB.add(self._device)
            if self._device is not None:
                self._device.end_step()
            if self._is_clocking():
                return
            self._end_sampling()
            self._end_device()
            self._read_live_objects()
            if self._wanted and self._trace is not None:
                self._begin_trace()
        elif self._profiler is not None and self._is_last_traced(summary):
            self._end_trace()
        if self._profiler is None and self._seen >= self._total:
            self._is_over = True
            self._stop()

    def _is_clocking(self) -> bool:
        """Return whether the next step is clocked; without a steady part clocking is extended."""
        count = len(self.observed.steps)
        if count < self._steps or self._is_distributed:
            return count < self._steps
        if count >= EXTENSION * self._steps or self.observed.live is not None:
            return False
        seconds = [step.seconds for step in self.observed.steps]
        return count >= MIN_EXTENDED_STEPS and not len(find_steady(seconds).values)

    def _is_last_traced(self, summary: StepSummary) -> bool:
        """Count a step under the profiler; return whether it was the last."""
        if self._profiler is not None:
            self._profiler.step()
        if not self._skipped_first:
            self._skipped_first = True  # the first step under the profiler includes its start
            return False
        if self._has_lines:
            self.observed.has_lines = True
            return True
        self.observed.traced.append(_step_time(summary))
        if len(self.observed.traced) < self._wanted:
            return False
        self._has_lines = self._wants_lines and self._lines.begin()
        return not self._has_lines

    def _end_sampling(self) -> None:
        """Stop sampling, for good."""
        if self.observed.sampler is not None and self.observed.live is None:
            self.observed.sampler.stop()
            if (error := self.observed.sampler.error) is not None:
                self.trouble.append(f"lines: sampling stopped after {type(error).__name__}: {error}")

    def _end_device(self) -> None:
        """Read the device's phases; its events are for the clocked steps alone."""
        device, self._device = self._device, None
        if device is not None:
            HUB.remove(device)
            device.finish()
            self.observed.device = device.steps
            if device.dropped_steps:
                self.trouble.append(f"phases on the device of {device.dropped_steps} steps")

    def _read_live_objects(self) -> None:
        optimizers = self.scope.optimizers()
        if len({frozenset(step.optimizers) for step in self.observed.steps[1:]}) > 1:
            self.trouble.append(
                f"a step of all {len(optimizers)} optimizers: they step alternately, and each of their steps "
                "counts as one, so that figures are averages over different steps"
            )
        self.observed.live = read_live_objects(self.forwards.models, optimizers)
        number = self.scope.number
        self.observed.optimizers = {number(optimizer): type(optimizer).__name__ for optimizer in optimizers}
        groups = [
            group for optimizer in optimizers for group in optimizer_groups(optimizer, number(optimizer))
        ]
        self.observed.description = Description(
            take_fingerprint(self.scope, self._arguments),
            tuple(self.scope.table.records),
            runtime_info(groups, HUB.loader_workers, self._core_wait),
        )

    def _begin_trace(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        of_device = {
            "cuda": torch.profiler.ProfilerActivity.CUDA,
            "xpu": torch.profiler.ProfilerActivity.XPU,
        }
        if (kind := devices.kind()) in of_device:
            kinds.append(of_device[kind])
        self._modules.follow(self.forwards.models)
        HUB.add(self._phases)
        self._wants_lines = not self._stacks and self._lines_possible()
        self._profiler = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(
                wait=0, warmup=1, active=self._wanted + self._wants_lines, repeat=1
            ),
            on_trace_ready=self._export,
            record_shapes=True,
            with_stack=self._stacks,
            acc_events=True,  # for its one cycle no difference; torch 2.11 warns without
        )
        self._profiler.start()

    def _lines_possible(self) -> bool:
        models = self.forwards.models
        if has_compiled() or any(is_compiled(module) for model in models for module in model.modules()):
            self.trouble.append("lines of copies: compiled code would be recompiled for them")
            return False
        if not lines_possible():
            self.trouble.append("lines of copies: the script has its own mode of torch functions")
            return False
        return True

    def _end_trace(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        HUB.remove(self._phases)
        self._lines.end()
        self._phases.close()
        if self.observed.live is not None:
            self.observed.live.autocast = self._modules.autocast
        self._modules.leave()
        if not self._exported:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a script that ended early leaves an incomplete cycle
                profiler.stop()
        if not self.observed.traced:
            self.trouble.append("no step was traced: the script ended before")

    def _export(self, profiler: torch.profiler.profile) -> None:
        self._exported = True
        profiler.export_chrome_trace(str(self._trace))


def _step_time(summary: StepSummary) -> StepTime:
    optimizers = tuple(map(str, summary.optimizers))
    others = (summary.separated, summary.backwards, optimizers, dict(summary.optimizer_seconds))
    return StepTime.of(summary.phases, summary.seconds, *others)
