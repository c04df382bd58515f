"""The loop of an experiment: trains, evaluates, measures, and returns the state that a resumed run needs."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backlight.experiments.checkpoints import restore, training_state

if TYPE_CHECKING:
    from torch import nn

    from backlight.experiments.experiment import Task
    from backlight.monitors.grokking.instrument.tracker import Tracker

MEMORISED_ACCURACY = 0.99
GENERALISED_ACCURACY = 0.95


class LearningPhase(enum.StrEnum):
    """The phase that two accuracies of one log suggest: a label for a progress bar, no verdict."""

    MEMORISING = "memorising"
    MEMORISED = "memorised"
    GENERALISING = "generalising"
    GENERALISED = "generalised"
    UNKNOWN = "no accuracies"


def learning_phase(train: float, test: float, chance: float) -> LearningPhase:
    """Return the phase: memorised from .99 on; generalising from halfway between chance and .95 on."""
    if not (math.isfinite(train) and math.isfinite(test)):
        return LearningPhase.UNKNOWN
    if test >= GENERALISED_ACCURACY:
        return LearningPhase.GENERALISED
    if test >= chance + 0.5 * (GENERALISED_ACCURACY - chance):
        return LearningPhase.GENERALISING
    return LearningPhase.MEMORISED if train >= MEMORISED_ACCURACY else LearningPhase.MEMORISING


@dataclass(frozen=True)
class Pace:
    """Number of steps, and the spacing of logs, thorough evaluations and checkpoints."""

    steps: int
    log_every: int
    thorough_every: int
    checkpoint_every: int


@dataclass
class Loop:
    """One training run, from ``start`` to the end of its pace.

    Attributes
    ----------
    on_log:
        Called with step and values of each evaluation; weights are those before the step.
    on_checkpoint:
        Called with step and the state that continuing at that step needs.
    before_log:
        Called before each logged step.
    start:
        First step; above 0 in a resumed run.
    """

    task: Task
    pace: Pace
    tracker: Tracker
    on_log: Callable[[int, Mapping[str, float]], None]
    on_checkpoint: Callable[[int, Mapping[str, Any]], None]
    before_log: Callable[[int], None] = lambda _step: None
    start: int = 0

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue at ``step`` from the state that ``on_checkpoint`` got."""
        restore(self.task, state["training"])
        self.tracker.load_state(state["tracker"])
        self.start = step

    def run(self) -> float:
        """Train to the end and return the duration in seconds. The last log is after the last step."""
        begin = time.perf_counter()
        pace = self.pace
        for step in range(self.start, pace.steps):
            if step > self.start and step % pace.checkpoint_every == 0:
                self.on_checkpoint(step, self.state())
            self.step(step)
        self.log(pace.steps, thorough=True)
        self.on_checkpoint(pace.steps, self.state())
        return time.perf_counter() - begin

    def step(self, step: int) -> None:
        """Log what is due before ``step``, and train it."""
        task, tracker = self.task, self.tracker
        task.before_step(step)
        if step % self.pace.log_every == 0:
            self.before_log(step)
            self.log(step, thorough=step % self.pace.thorough_every == 0)
        task.optimizer.zero_grad(set_to_none=True)
        task.loss(task.model, task.batch(step)).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        if tracker.wants(step):
            # Before the optimizer step: the samples must see the weights that the gradient was taken at.
            tracker.gradients(step, named_gradients(task.model))
            tracker.close(step)
            tracker.sample(step)
        task.optimizer.step()
        if task.scheduler is not None:
            task.scheduler.step()

    def log(self, step: int, *, thorough: bool) -> None:
        """Evaluate the current weights."""
        self.on_log(step, self.task.evaluate(thorough=thorough))

    def state(self) -> dict[str, Any]:
        """Return all that continuing here needs."""
        return {"training": training_state(self.task), "tracker": self.tracker.state()}


def named_gradients(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the gradients of a model by parameter name; a tied parameter has its first name."""
    return [(name, parameter.grad) for name, parameter in model.named_parameters()]
