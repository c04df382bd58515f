"""Phase times of a stored run as one table, and its steady part. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backlight.monitors.steptime.model.steady_state import Steady, find_steady
from backlight.store.read.run import Run

PREFIX = "phase/"
"""What the scalars of phase times begin with."""


@dataclass(frozen=True)
class Recorded:
    """Seconds by step and phase; a phase that a step did not have took no time in it.

    Attributes
    ----------
    steps:
        Global steps, int64 [S].
    names:
        Phases, without the prefix of their scalars.
    seconds:
        float64 [S, phases]; the sum of a row is the time of the step.
    """

    steps: npt.NDArray[np.int64]
    names: tuple[str, ...]
    seconds: npt.NDArray[np.float64]

    @property
    def total(self) -> npt.NDArray[np.float64]:
        """Return the time of each step, [S]."""
        return np.asarray(self.seconds.sum(axis=1))

    def phase(self, name: str) -> npt.NDArray[np.float64]:
        """Return the seconds of one phase, [S]; zeros for one that no step had."""
        if name not in self.names:
            return np.zeros(len(self.steps))
        return self.seconds[:, self.names.index(name)]

    def steady(self) -> tuple[Steady, Recorded]:
        """Return the steady part of the step times, and the table without the warm-up."""
        found = find_steady(self.total)
        rest = slice(found.warmup, None)
        return found, Recorded(self.steps[rest], self.names, self.seconds[rest])


def read_phases(run: Run, *, rank: int | None = None) -> Recorded | None:
    """Return the phase times of the newest attempt of a run; None where none were recorded.

    An attempt is a process of its own with a warm-up of its own, so that attempts are not joined.

    Parameters
    ----------
    run:
        A stored run.
    rank:
        The rank to read; None for the lowest that recorded.
    """
    if not run.attempts:
        return None
    newest = run.attempts[-1].index
    names = [name for name in run.scalar_names("backlight") if name.startswith(PREFIX)]
    scalars = {
        name.removeprefix(PREFIX): scalar
        for name in names
        if len((scalar := run.scalar(name, attempt=newest, rank=rank)).steps)
    }
    if not scalars:
        return None
    steps = np.unique(np.concatenate([scalar.steps for scalar in scalars.values()]))
    seconds = np.zeros((len(steps), len(scalars)))
    for column, scalar in enumerate(scalars.values()):
        seconds[np.searchsorted(steps, scalar.steps), column] = scalar.values
    sound = np.isfinite(seconds).all(axis=1) & (seconds >= 0).all(axis=1) & (seconds.sum(axis=1) > 0)
    return Recorded(steps[sound], tuple(scalars), seconds[sound]) if sound.any() else None
