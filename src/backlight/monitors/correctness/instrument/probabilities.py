"""Whether cross-entropy is given probabilities, by their values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.cross_entropy_calls import CrossEntropyCalls
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.loss_graph import contradictions_below

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

LOOKS = 4
"""Steps whose losses are observed: the code of a loop rarely changes."""

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Deviation of a sum of probabilities from 1; that of other types is :data:`HALF_TOLERANCE`."""

HALF_TOLERANCE = 2e-2

STEPS = 2
"""Steps at which that is so before it is reported."""

SHOWN_BY_THE_GRAPH = frozenset({"softmax_twice", "sigmoid_before_softmax"})
"""Kinds that are reported without their values."""


class Probabilities(Check):
    """``loss_input``, ``probabilities``: every row that cross-entropy gets is in [0, 1] and adds up to 1.

    The graph shows a softmax right before the loss; a mixture of several shows in its values only.
    """

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._calls = CrossEntropyCalls()
        self._left = LOOKS
        self._found: list[tuple[float, list[Tensor]]] = []  # tolerance, lowest value, extent of the sums
        self._steps: list[int] = []  # at which all inputs were probabilities

    def forget(self) -> None:
        """Observe no longer."""
        self._calls.stop()
        self._found = []

    def forward_begin(self) -> None:
        """Observe the loss of this forward."""
        if self._left and torch.is_grad_enabled():
            self._calls.start()

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe the loss of the next step."""
        if self._left and self.run.scope.holds(optimizer):
            self._calls.start()

    def cross_entropy(self, given: Tensor) -> None:
        """Compare each row of the input with a distribution."""
        if given.ndim < 2 or given.shape[1] < 2 or not given.is_floating_point() or not given.numel():
            return
        with torch.no_grad():
            values = given.detach().float()
            extent = [values.amin(), *torch.aminmax(values.sum(1))]
            self._found.append((TOLERANCE.get(given.dtype, HALF_TOLERANCE), extent))

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Report the losses of the step."""
        found, self._found = self._found, []
        self._calls.stop()
        if not found or not self._left:
            return
        self._left -= 1
        kinds = {kind for root in roots for kind, _ in contradictions_below(root.grad_fn)}
        if not kinds & SHOWN_BY_THE_GRAPH:
            tolerances = [tolerance for tolerance, _ in found]
            then = functools.partial(self._note, self.run.clock.index, tolerances)
            self.when_known(then, *[value for _, extent in found for value in extent])

    def _note(self, step: int, tolerances: Sequence[float], *values: NDArray[np.generic]) -> None:
        """Report steps from the second one on: at the first, the output of a model may be constant."""
        extents = np.array(values, np.float64).reshape(-1, 3)
        if all(
            lowest >= 0 and max(abs(low - 1), abs(high - 1)) <= tolerance
            for tolerance, (lowest, low, high) in zip(tolerances, extents, strict=True)
        ):
            self._steps.append(step)
            for one in self._steps if len(self._steps) == STEPS else self._steps[STEPS:][-1:]:
                self.report("loss_input", one, kind="probabilities")
