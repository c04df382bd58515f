"""The loop of an experiment: it trains, evaluates, measures, and gives the state that a resumed run needs."""

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

FITTED = 0.99
GENERALISED = 0.95


class LearningPhase(enum.StrEnum):
    """What the two accuracies say at one log."""

    MEMORISING = "memorising"
    MEMORISED = "memorised"
    GENERALISING = "generalising"
    GENERALISED = "generalised"
    UNKNOWN = "no accuracies"


def phase(train: float, test: float, chance: float) -> LearningPhase:
    """Return the phase: fitted from .99 on; generalising from halfway between chance and .95 on."""
    if not (math.isfinite(train) and math.isfinite(test)):
        return LearningPhase.UNKNOWN
    if test >= GENERALISED:
        return LearningPhase.GENERALISED
    if test >= chance + 0.5 * (GENERALISED - chance):
        return LearningPhase.GENERALISING
    return LearningPhase.MEMORISED if train >= FITTED else LearningPhase.MEMORISING


@dataclass(frozen=True)
class Pace:
    """How long the loop runs, and between how many steps it does what."""

    steps: int
    log_every: int
    thorough_every: int
    checkpoint_every: int


@dataclass
class Loop:
    """One training, from ``start`` to the end of its pace.

    Attributes
    ----------
    task, pace, tracker:
        What is trained, for how long, and what measures it.
    on_log:
        Called with step and values of each evaluation; weights are those before the step.
    on_checkpoint:
        Called with step and state: all that continuing at that step needs.
    between:
        Called before each logged step.
    start:
        First step; above 0 in a resumed training.
    """

    task: Task
    pace: Pace
    tracker: Tracker
    on_log: Callable[[int, Mapping[str, float]], None]
    on_checkpoint: Callable[[int, Mapping[str, Any]], None]
    between: Callable[[int], None] = lambda _step: None
    start: int = 0

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue at ``step`` with what ``on_checkpoint`` was given."""
        restore(self.task, state["training"])
        self.tracker.load_state(state["tracker"])
        self.start = step

    def run(self) -> float:
        """Train to the end; return the seconds that it took. The last log is after the last step."""
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
            self.between(step)
            self.log(step, thorough=step % self.pace.thorough_every == 0)
        task.optimizer.zero_grad(set_to_none=True)
        task.loss(task.model, task.batch(step)).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        if tracker.wants(step):
            tracker.gradients(step, named_gradients(task.model))
            tracker.close(step)
            tracker.sample(step)
        task.optimizer.step()
        if task.scheduler is not None:
            task.scheduler.step()

    def log(self, step: int, *, thorough: bool) -> None:
        """Evaluate with the weights as they are."""
        self.on_log(step, self.task.evaluate(thorough=thorough))

    def state(self) -> dict[str, Any]:
        """Return all that continuing here needs."""
        return {"training": training_state(self.task), "tracker": self.tracker.state()}


def named_gradients(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the gradients of a model by parameter name; a tied parameter has its first name."""
    return [(name, parameter.grad) for name, parameter in model.named_parameters()]
