"""Whether every target of a classification is the same class."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.hub import HUB
from backlight.capture.loss_nodes import Node, below_shapes, first_input, kind_of, kinds
from backlight.capture.loss_terms import CLASS_LOSSES, are_plain, terms
from backlight.monitors.correctness.instrument.check import Check

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

STEPS = 8
"""Steps whose targets are one class before it is reported."""

TARGETS = 1000
"""The same for targets: of a class of 1 %, one in 23,000 data sets shows none among so many."""

_LAYERS = kinds("Addmm Mm Linear Convolution")
"""What makes the scores of a classifier. Those of a contrastive loss are similarities, all of class 0."""


class LossTargets(Check):
    """``loss_input``, ``one_class``: every target that cross-entropy got so far is the same class.

    The first step with another one ends the check. ``several_classes``: it came after the report.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._class: int | None = None
        self._is_classified = False
        self._steps = self._targets = 0

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Compare the targets of the losses below."""
        losses = [
            node
            for root in roots
            for kind, node in terms(root.grad_fn)
            if kind in CLASS_LOSSES and are_plain(node, "target") and _is_classifier(node)
        ]
        if losses:
            self._is_classified = True
            filled = [node for node in losses if node._saved_target.numel()]
            sizes = [node._saved_target.numel() for node in filled]
            values = [value for node in filled for value in _extent(node)]
            self.when_known(functools.partial(self._note, self.run.clock.index, sizes), *values)
        elif roots and not self._is_classified:
            HUB.remove(self)  # another loss

    def _note(self, step: int, sizes: Sequence[int], *values: NDArray[np.generic]) -> None:
        extents = np.array(values, np.int64).reshape(-1, 3)  # lowest and highest class, and how many targets
        extents[:, 2] = sizes - extents[:, 2]
        extents = extents[extents[:, 2] > 0]
        if not len(extents):
            return
        self._class = int(extents[0, 0]) if self._class is None else self._class
        is_reported = self._is_due()
        is_over = bool((extents[:, :2] != self._class).any())
        self._steps += 1
        self._targets += int(extents[:, 2].sum())
        if not is_over and self._is_due() and (not is_reported or self._steps & (self._steps - 1) == 0):
            facts = {"class_index": self._class, "targets": self._targets, "losses": self._steps}
            self.report("loss_input", step, kind="one_class", **facts)
        elif is_over and is_reported:
            self.report("loss_input", step, kind="several_classes")
        if is_over:
            HUB.remove(self)

    def _is_due(self) -> bool:
        return self._steps >= STEPS and self._targets >= TARGETS


def _is_classifier(loss: Node) -> bool:
    """Return whether a layer makes the scores."""
    probabilities = below_shapes(first_input(loss))
    if kind_of(probabilities) != "LogSoftmax" or probabilities is None:
        return False
    return kind_of(below_shapes(first_input(probabilities))) in _LAYERS


@torch.no_grad()
def _extent(loss: Node) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lowest and the highest class among the targets, and how many do not count."""
    targets: Tensor = loss._saved_target.detach()
    index, limits = loss._saved_ignore_index, torch.iinfo(targets.dtype)
    ignored = targets == index
    low = targets.masked_fill(ignored, limits.max).amin()
    # What is ignored is mostly below all classes; torch shows it without its sign.
    high = targets.amax() if not 0 <= index < 2**63 else targets.masked_fill(ignored, limits.min).amax()
    return low, high, ignored.sum()
