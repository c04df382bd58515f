"""Whether a script sets the global generator to the same seed again while it trains."""

from __future__ import annotations

from collections import Counter

import torch

from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules.repeated_data import SeededAgain
from backlight.user_code import user_line

TIMES = 2
"""Times during training that the same line sets the same seed, from which on that is reported."""


class GlobalSeed(Check):
    """Counts the calls of ``torch.manual_seed`` that a later step of an optimizer still depends on.

    A state that is set in between, as at the end of ``fork_rng``, takes the seed back.
    """

    name = "global_seed"
    steps = "all"

    def _start(self) -> None:
        self._pending: tuple[int, str] | None = None
        self._times = Counter[tuple[int, str]]()

    def seeded(self, seed: int) -> None:
        """Note a seed, unless no step has been taken."""
        self._pending = (seed, str(user_line() or "")) if self.run.clock.done else None

    def random_state_set(self) -> None:
        """The random numbers go on from another state."""
        self._pending = None

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Count what was noted before this step."""
        if self._pending is None:
            return
        call, self._pending = self._pending, None
        self._times[call] += 1
        if self._times[call] == TIMES:
            self.report(SeededAgain(self.step, *call))
