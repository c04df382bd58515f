"""Watch a script for a profile: some steps with the clock alone, then a few with torch's profiler.

The times of steps come from the first, where nothing but a clock runs; what operations and modules
share of them comes from the second, whose overhead is known from both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from backlight.capture.forward import TrainedModels
from backlight.capture.hub import HUB
from backlight.capture.parameters import Scope
from backlight.capture.steps import StepSummaries, StepSummary, StepTracker
from backlight.diagnose.profile.device_phases import DevicePhases
from backlight.diagnose.profile.optimizations import Live, look
from backlight.diagnose.profile.ranges import ModuleRanges, PhaseRanges, compiled, is_compiled
from backlight.diagnose.profile.source_lines import LineRanges, lines_possible
from backlight.distributed import world
from backlight.monitors.steptime.model.step_times import WINDOW_STEPS, find_steady
from backlight.records import Phase


@dataclass(frozen=True)
class StepTime:
    """One step: its host seconds, those of its phases, which add up to them, and who stepped, by number."""

    seconds: float
    phases: dict[str, float]
    separated: bool
    backwards: int
    optimizers: tuple[str, ...] = ()


@dataclass
class Observed:
    """What was seen of a script.

    Attributes
    ----------
    steps:
        Steps under the clock alone, in order, the cold first one included.
    traced:
        Steps under the profiler.
    device:
        Seconds of the device by phase of the clocked steps from the second on; empty without a device.
    live, description:
        What the live objects said when the clocked steps were over; what ``describe`` made of the scope.
    lined:
        Whether one more step follows them in the trace, with the lines of its calls.
    trouble:
        Why something that was asked for is not there.
    """

    steps: list[StepTime] = field(default_factory=list)
    traced: list[StepTime] = field(default_factory=list)
    lined: bool = False
    device: list[dict[str, float]] = field(default_factory=list)
    live: Live | None = None
    description: Any = None
    trouble: list[str] = field(default_factory=list)


LONGER = 4
"""Times as many steps that are clocked where no steady part is found in the steps that were asked for."""

WORTH = 1 + 2 * WINDOW_STEPS
"""Steps from which it is worth going on for a steady part; who asks for fewer gets those."""


class _Tracker(StepTracker):
    """Tells when the models may be known: at the end of a backward."""

    found: Callable[[], None]
    made: Callable[[torch.optim.Optimizer], None]
    trouble: Callable[[Exception], None]

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for the model that it holds, so that its first forward is seen."""
        self.made(optimizer)

    def backward_end(self) -> None:
        """Look for the models whose forwards are to be followed."""
        super().backward_end()
        self.found()

    def dropped(self, error: Exception) -> None:
        """Remember that nothing is measured any more."""
        self.trouble(error)


class Observer(AbstractContextManager["Observer"]):
    """Entered before a script and left after it; ends the script when it has seen enough.

    Parameters
    ----------
    stop:
        Ends the script.
    steps:
        Steps under the clock, the cold first one included.
    traced:
        Steps under the profiler after them; 0 for none.
    trace:
        Where the profiler's trace goes, in Chrome's format; compressed if it ends in ``.gz``. None to let
        these steps pass without a profiler, as ranks other than the first do.
    stacks:
        Record the stack of every operation in all traced steps, instead of lines in one step more.
    describe:
        Called with the scope when the clocked steps are over.
    """

    def __init__(
        self,
        stop: Callable[[], None],
        steps: int,
        traced: int,
        trace: Path | None,
        *,
        stacks: bool = False,
        describe: Callable[[Scope], Any] | None = None,
    ) -> None:
        self.observed = Observed()
        self._stop = stop
        self._steps = steps
        self._wanted = traced
        # Ranks wait for each other: all of them take the same number of steps, and then leave.
        self._several = world().size > 1
        self._total = steps + (traced + 2 if traced else 0) if self._several else 0
        self._seen = 0
        self._over = False
        self._trace = trace
        self._stacks = stacks
        self._describe = describe
        self._wants_lines = False
        self._scope = Scope()
        self.trained = TrainedModels(self._scope)
        self._modules = ModuleRanges()
        self._lines = LineRanges()
        self._lining = False
        self._phases = PhaseRanges()
        self._profiler: torch.profiler.profile | None = None
        self._dropped = False
        self._exported = False
        self._device = DevicePhases() if torch.cuda.is_available() else None
        self._tracker = _Tracker(self._scope, StepSummaries(self._closes))
        self._tracker.found = self.trained.of_scope
        self._tracker.made = self.trained.of_optimizer
        self._tracker.trouble = self._lost

    def __enter__(self) -> Observer:
        """Attach the clock."""
        self._tracker.start()
        if self._device is not None:
            HUB.add(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take everything off, and keep what a script that ended early has left."""
        self._tracker.finish()
        if self.observed.live is None and self.observed.steps:
            self._look()
        self._end_trace()
        self._end_device()
        self.trained.leave()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that were seen."""
        return self._scope.optimizers()

    def _lost(self, error: Exception) -> None:
        self.observed.trouble.append(f"the clock stopped after {type(error).__name__}: {error}")

    def _closes(self, summary: StepSummary) -> None:
        if self._over:
            return  # the script is ending
        self._seen += 1
        if self._live_steps():
            self.observed.steps.append(_step(summary))
            if self._device is not None:
                self._device.step_ends()
            if self._live_steps():
                return
            self._end_device()
            self._look()
            if self._wanted and self._trace is not None:
                self._begin_trace()
        elif self._profiler is not None and self._traced(summary):
            self._end_trace()
        if self._profiler is None and self._seen >= self._total:
            self._over = True
            self._stop()

    def _live_steps(self) -> bool:
        """Tell whether the next step belongs under the clock; without a steady part it goes on for longer."""
        count = len(self.observed.steps)
        if count < self._steps or self._several:
            return count < self._steps
        if count >= LONGER * self._steps or self.observed.live is not None:
            return False
        return count >= WORTH and not len(find_steady([s.seconds for s in self.observed.steps]).values)

    def _traced(self, summary: StepSummary) -> bool:
        """Count a step under the profiler; tell whether it was the last."""
        if self._profiler is not None:
            self._profiler.step()
        if not self._dropped:
            self._dropped = True  # the first step under the profiler pays for its start
            return False
        if self._lining:
            self.observed.lined = True
            return True
        self.observed.traced.append(_step(summary))
        if len(self.observed.traced) < self._wanted:
            return False
        self._lining = self._wants_lines and self._lines.begin()
        return not self._lining

    def _end_device(self) -> None:
        """Read the device's phases; its events are for the clocked steps alone."""
        device, self._device = self._device, None
        if device is not None:
            HUB.remove(device)
            device.finish()
            self.observed.device = device.steps
            if device.given_up:
                self.observed.trouble.append(f"phases on the device of {device.given_up} steps")

    def _look(self) -> None:
        turns = {frozenset(step.optimizers) for step in self.observed.steps[1:]}
        if len(turns) > 1:
            self.observed.trouble.append(
                f"a step of all {len(self._scope.optimizers())} optimizers: they step in turn, and the step "
                "of each counts as one, so that figures of steps are over unlike ones"
            )
        self.observed.live = look(self.trained.models, self._scope.optimizers())
        self.observed.description = self._describe(self._scope) if self._describe is not None else None

    def _begin_trace(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._modules.follow(self.trained.models)
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
        )
        self._profiler.start()

    def _lines_possible(self) -> bool:
        models = self.trained.models
        if any(is_compiled(module) for model in models for module in model.modules()) or compiled():
            self.observed.trouble.append("lines of copies: compiled code would be compiled anew for them")
            return False
        if not lines_possible():
            self.observed.trouble.append(
                "lines of copies: the script has a mode of torch functions of its own"
            )
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
            self.observed.trouble.append("no step was traced: the script ended before")

    def _export(self, profiler: torch.profiler.profile) -> None:
        self._exported = True
        profiler.export_chrome_trace(str(self._trace))


def _step(summary: StepSummary) -> StepTime:
    phases = {str(name): seconds for name, seconds in summary.phases.items()}
    phases[Phase.OTHER] = max(0.0, summary.seconds - sum(phases.values()))
    # The names of learning rates hold the number of their optimizer: lr/<number>/<group>.
    stepped = tuple(dict.fromkeys(name.split("/")[1] for name, _ in summary.rates))
    return StepTime(summary.seconds, phases, summary.separated, summary.backwards, stepped)
