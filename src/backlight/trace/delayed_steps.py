"""Steps that took much longer than others with as many calls, as one that is preempted does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.text import duration
from backlight.trace.classification import PHASES
from backlight.trace.host_moments import OUTSIDE
from backlight.trace.timeline import Step, Timeline

DELAYED = 1.5
"""Length of a delayed step, in medians of the steps with as many calls."""

SAME_CALLS = 0.1
"""Share by which the calls of two steps of one kind differ at most; alternating steps are of two kinds."""

MIN_STEPS = 3
"""Steps of one kind whose median means something."""


@dataclass(frozen=True)
class DelayedStep:
    """A step ``times`` as long as the median of its kind, ``longer`` nanoseconds of it more in ``phase``."""

    step: Step
    times: float
    phase: str
    longer: int

    @property
    def note(self) -> str:
        """What it is, in words."""
        length = duration((self.step.end - self.step.start) / 1e9)
        return (
            f"step {self.step.number} took {length}, {self.times:.1f} times the median, "
            f"{duration(self.longer / 1e9)} of it more in {self.phase}: it is in no share"
        )


def delayed_steps(timeline: Timeline) -> list[DelayedStep]:
    """Return the delayed steps; none where they are so many that they are the rule."""
    steps, moments = timeline.steps, timeline.moments
    if len(steps) < MIN_STEPS:
        return []
    begun = timeline.step_of(timeline.tree.start)
    calls = np.bincount(begun[begun >= 0], minlength=len(steps))
    length = np.array([step.end - step.start for step in steps], dtype=np.int64)
    phase = np.append(timeline.phases, len(PHASES))[moments.call]
    spent = np.zeros((len(steps), len(PHASES) + 1), np.int64)
    np.add.at(spent, (moments.step, phase), moments.end - moments.start)
    found = []
    for index, step in enumerate(steps):
        same = np.abs(calls - calls[index]) <= SAME_CALLS * calls[index]
        times = float(length[index] / np.median(length[same]))
        if same.sum() >= MIN_STEPS and times > DELAYED:
            longer = spent[index] - np.median(spent[same], axis=0)
            most = int(longer.argmax())
            name = OUTSIDE if most == len(PHASES) else PHASES[most].value.replace("_", " ")
            found.append(DelayedStep(step, times, name, int(longer[most])))
    # What comes back every few steps is a property of the loop.
    few = max(1, min(len(steps) // 4, 3), len(steps) // 10)
    return found if len(found) <= few else []
