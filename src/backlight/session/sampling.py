"""Which steps are recorded: every Nth as asked for, or as many as the budget of time allows."""

from __future__ import annotations

from dataclasses import dataclass

BUDGET = 0.01
"""Share of a training's time that the default monitors may take together."""

GRACE = 2.0
"""Seconds that a run may cost before the budget binds: a short run is recorded whole."""

LARGEST = 1024
"""Widest spacing that the budget may lead to."""

_REVIEW = 32


@dataclass
class Cadence:
    """Decides step by step, so that the recorded steps stay on a regular grid.

    Parameters
    ----------
    every:
        Record every Nth step; None to double and halve the spacing by the budget.
    budget:
        Share of the elapsed time that may be spent.
    grace:
        Seconds that may be spent in any case.
    """

    every: int | None = None
    budget: float = BUDGET
    grace: float = GRACE
    spacing: int = 1
    _detail_until: int = -1
    _reviewed: int = 0
    _spent: float = 0.0
    _elapsed: float = 0.0

    def __post_init__(self) -> None:
        if self.every is not None:
            if self.every < 1:
                raise ValueError(f"every={self.every}: expected a step count of 1 or more")
            self.spacing = self.every

    def wants(self, step: int) -> bool:
        """Whether ``step`` is to be recorded."""
        return step % self.spacing == 0 or step <= self._detail_until

    def detail(self, step: int, steps: int) -> None:
        """Record every one of the next ``steps`` steps, because of a finding."""
        self._detail_until = max(self._detail_until, step + steps)

    def in_detail(self, step: int) -> bool:
        """Whether ``step`` belongs to steps that a finding asked for."""
        return step <= self._detail_until

    def review(self, step: int, spent: float, elapsed: float) -> int | None:
        """Return the new spacing if ``spent`` of ``elapsed`` seconds asks for another, else None."""
        if self.every is not None or step - self._reviewed < max(_REVIEW, self.spacing):
            return None
        recent = spent - self._spent, elapsed - self._elapsed
        self._reviewed, self._spent, self._elapsed = step, spent, elapsed
        over = spent > self.grace + self.budget * elapsed
        if over and recent[0] > self.budget * recent[1] and self.spacing < LARGEST:
            self.spacing *= 2
            return self.spacing
        if self.spacing > 1 and recent[0] < 0.4 * self.budget * recent[1]:
            self.spacing //= 2
            return self.spacing
        return None
