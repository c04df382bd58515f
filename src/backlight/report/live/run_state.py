"""The state of a followed run, and the window of steps that a live page shows."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.records import RunStatus
from backlight.report.source import Source
from backlight.report.verdict import ending
from backlight.store.read.run import Frame, Run, Scalar
from backlight.text import number


class Standing(enum.StrEnum):
    """What a live view says of a run, in one word; of several runs, the first here that one of them has."""

    READING = "reading"
    RUNNING = "running"
    WAITING = "waiting"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"
    KILLED = "killed"
    FAILED = "failed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Stand:
    """The standing, and the sentence that says what it does not say by itself."""

    word: Standing
    detail: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will come, so that no one needs to ask again."""
        return self.word in {Standing.FINISHED, Standing.FAILED}

    def as_json(self) -> dict[str, Any]:
        """Return what a page is sent."""
        return {"word": self.word.value, "detail": self.detail, "over": self.over}


READING = Stand(Standing.READING, "The run is being read.")
EMPTY = Stand(Standing.WAITING, "Waiting for the first step: no run began in this folder yet.")


def stand_of(run: Run) -> Stand:
    """Tell how ``run`` stands, by the status of its newest attempt."""
    last = run.last_step()
    steps = "no step was taken" if last < 0 else f"the last step is {number(last)}"
    status = run.status
    if status is RunStatus.RUNNING:
        if last < 0:
            return Stand(
                Standing.WAITING, "Waiting for the first step: the run began, nothing is recorded yet."
            )
        return Stand(Standing.RUNNING, f"The training runs; {steps}.")
    if status is RunStatus.KILLED:
        return Stand(Standing.KILLED, f"The process ended without closing the run; {steps}.")
    if status is RunStatus.UNKNOWN:
        return Stand(Standing.UNKNOWN, f"Nothing was heard of the writer for a while; {steps}.")
    if status is RunStatus.FAILED:
        return Stand(Standing.FAILED, f"{ending(run)}; {steps}.")
    return Stand(Standing.FINISHED, f"The training ended; {steps}.")


class Windowed:
    """The steps ``first`` to ``last`` of ``run``, both included; everything else is the run's."""

    def __init__(self, run: Run, first: int, last: int) -> None:
        self._run = run
        self._first, self._last = first, last

    def frame(self, series: str, column: str, **where: Any) -> Frame:
        """Return a column of a series at the steps of the window."""
        whole = self._run.frame(series, column, **where)
        part = self._part(whole.steps)
        return dataclasses.replace(
            whole,
            steps=whole.steps[part],
            values=whole.values[part],
            measured=whole.measured[part],
            any_rank=None if whole.any_rank is None else whole.any_rank[part],
        )

    def scalar(self, name: str, source: str = "backlight", **where: Any) -> Scalar:
        """Return a scalar at the steps of the window."""
        whole = self._run.scalar(name, source, **where)
        part = self._part(whole.steps)
        return Scalar(whole.steps[part], whole.values[part], whole.unit)

    def series_steps(self, series: str) -> NDArray[np.int64]:
        """Return the steps of the window at which the series was recorded."""
        steps = self._run.series_steps(series)
        return steps[self._part(steps)]

    def _part(self, steps: NDArray[np.int64]) -> slice:
        low, high = np.searchsorted(steps, (self._first, self._last + 1))
        return slice(int(low), int(high))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def window(source: Source, first: int, last: int) -> Source:
    """Return ``source`` with the steps ``first`` to ``last`` alone."""
    run: Any = Windowed(source.run, first, last)
    return dataclasses.replace(source, run=run)
