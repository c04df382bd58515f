"""Random numbers inside of checkpointed regions that do not preserve the random state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backlight import devices
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules.recomputation import OtherRandomNumbers
from backlight.user_code import user_line


class Recomputation(Check):
    """``recomputation_differs``: a region draws random numbers that its recomputation cannot draw again."""

    name = "recomputation"

    def _start(self) -> None:
        self._states: list[list[torch.Tensor]] = []

    def forget(self) -> None:
        """Drop the regions in progress."""
        self._states.clear()

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Drop regions that raised."""
        self._states.clear()

    def region_begin(self) -> None:
        """Read the random state."""
        if self.due and torch.is_grad_enabled() and not devices.is_capturing_graph():
            self._states.append(_random_states())

    def region_end(self) -> None:
        """Compare the random state."""
        if not self._states or devices.is_capturing_graph():
            return
        before = self._states.pop()
        if any(not torch.equal(state, other) for state, other in zip(before, _random_states(), strict=True)):
            self.report(OtherRandomNumbers(self.step, str(user_line() or "")))


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, *devices.accelerator_random_states()] if devices.is_in_use() else states
