"""A stretch of the steps of a run, read as if nothing else were recorded: details where somebody looks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.report.source import Source
from backlight.store.read.run import Frame, Run, Scalar


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
