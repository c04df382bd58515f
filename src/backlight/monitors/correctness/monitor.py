"""Facts of a training run that contradict what its author must have meant."""

from __future__ import annotations

from backlight.capture.hub import HUB
from backlight.monitor import Monitor, RunContext
from backlight.monitors.correctness.instrument.autocast_effect import AutocastEffect
from backlight.monitors.correctness.instrument.check import Check, Schedule
from backlight.monitors.correctness.instrument.evaluation_modes import EvaluationModes
from backlight.monitors.correctness.instrument.gradient_use import GradientUse
from backlight.monitors.correctness.instrument.loader_batches import LoaderBatches
from backlight.monitors.correctness.instrument.loss_graph import LossGraph
from backlight.monitors.correctness.instrument.loss_targets import LossTargets
from backlight.monitors.correctness.instrument.microbatch_weights import MicrobatchWeights
from backlight.monitors.correctness.instrument.mixed_precision import MixedPrecision
from backlight.monitors.correctness.instrument.model_inputs import ModelInputs
from backlight.monitors.correctness.instrument.module_modes import ModuleModes
from backlight.monitors.correctness.instrument.probabilities import Probabilities
from backlight.monitors.correctness.instrument.recomputation import Recomputation
from backlight.monitors.correctness.instrument.repeated_inputs import RepeatedInputs
from backlight.monitors.correctness.instrument.replicas import ReplicaDigests
from backlight.monitors.correctness.instrument.restored_state import RestoredState
from backlight.monitors.correctness.instrument.schedule_steps import ScheduleSteps
from backlight.monitors.correctness.instrument.trained_tensors import TrainedTensors
from backlight.monitors.correctness.instrument.transfers import TransferDigests
from backlight.monitors.correctness.instrument.unprepared_modules import UnpreparedModules
from backlight.monitors.correctness.instrument.weight_changes import WeightChanges
from backlight.monitors.correctness.model.contradictions import OBSERVED

CHECKS: tuple[type[Check], ...] = (
    AutocastEffect,
    EvaluationModes,
    GradientUse,
    LoaderBatches,
    LossGraph,
    LossTargets,
    MicrobatchWeights,
    MixedPrecision,
    ModelInputs,
    ModuleModes,
    Probabilities,
    Recomputation,
    RepeatedInputs,
    ReplicaDigests,
    RestoredState,
    ScheduleSteps,
    TrainedTensors,
    TransferDigests,
    UnpreparedModules,
    WeightChanges,
)
"""The checks, each of which listens to the events of the process."""


class CorrectnessMonitor(Monitor):
    """Compares what the process holds at the first steps, and then at growing intervals."""

    name = "correctness"
    records = "contradictions in the training loop"

    def attach(self, run: RunContext) -> None:
        """Start every check."""
        self._run, self._schedule = run, Schedule()
        self._checks = [check(run, self._schedule) for check in CHECKS]
        run.listen(self._schedule.loaded)
        for check in self._checks:
            run.listen(check)
        run.follow_forwards()

    def detach(self, error: BaseException | None) -> None:
        """Wait for what is still on a device, and record how many steps were observed."""
        for check in self._checks:
            check.forget()
        self._schedule.copies.settle(wait=True)
        if self._schedule.observed:
            self._run.notifier.event(OBSERVED, {"steps": self._schedule.observed})

    def next_step(self, step: int) -> int:
        """Return the next step that is near an observation."""
        return self._schedule.next_step(step)

    def on_step_start(self, step: int) -> None:
        """Decide whether the step is observed; between observations only some checks listen."""
        was_near = self._schedule.near
        self._schedule.begin(step)
        self._schedule.copies.settle(wait=False)
        if self._schedule.near == was_near:
            return
        for check in self._checks:
            if check.is_windowed and self._schedule.near:
                self._run.listen(check)
            elif check.is_windowed:
                HUB.remove(check)
                check.forget()
