"""Whether the matrix products of the loss's graph were computed in the type of the autocast around them."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.loss_nodes import sequence_number
from backlight.monitors.correctness.instrument.check import Check

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

LOOKS = 3
"""Backward passes whose graph is looked at: the code of a loop rarely changes."""

MAX_NODES = 512
"""Nodes of a graph that are visited."""

_PRODUCT = re.compile(r"^(\w*mm|Linear|\w*Conv\w*|\w*Rnn\w*|\w*Attention\w*)Backward\d*$", re.IGNORECASE)
"""Names of nodes that multiply matrices."""


class AutocastEffect(Check):
    """``mixed_precision``, ``autocast_without_effect``: products in fp32 although autocast was entered.

    Nodes of the graph are numbered as they are made, so that the numbers at the begin and the end of a region
    tell which nodes were made in it. Regions without gradients make none, and graphs with nodes of Python
    functions (compiled code, checkpoints) are left out.
    """

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._left = LOOKS
        self.forget()

    def forget(self) -> None:
        """Drop the regions of this step."""
        self._begin: int | None = None
        self._regions: list[tuple[int, int]] = []
        self._device = self._dtype = ""

    def autocast_begin(self, region: Any) -> None:
        """Note the number of the next node."""
        if self._left and self.due and sequence_number is not None:
            self._begin = sequence_number()
            self._device = str(getattr(region, "device", ""))
            self._dtype = str(getattr(region, "fast_dtype", "")).removeprefix("torch.")

    def autocast_end(self, region: Any) -> None:
        """Note the numbers of the nodes that the region made."""
        if self._begin is not None and sequence_number is not None:
            self._regions.append((self._begin, sequence_number()))
            self._begin = None

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Compare the types of the products inside and outside of the regions."""
        if self._begin is not None and sequence_number is not None:
            self._regions.append((self._begin, sequence_number()))
            self._begin = sequence_number()
        regions, self._regions = [one for one in self._regions if one[0] < one[1]], []
        if not regions or not self._left:
            return
        self._left -= 1
        found = _products([root.grad_fn for root in roots if root.grad_fn is not None], regions)
        if found is not None:
            facts = {"device": self._device, "dtype": self._dtype, "inside": found}
            self.report("mixed_precision", self.run.clock.index, kind="autocast_without_effect", **facts)


def _products(roots: Sequence[Any], regions: Sequence[tuple[int, int]]) -> int | None:
    """Return how many products of the regions are in fp32; None if one is not, or that is not known.

    Nodes are visited from the last to the first that was made, until those of the regions are through and a
    product in fp32 was met.
    """
    order = itertools.count()  # nodes of equal number are not compared
    pending = [(-root._sequence_nr(), next(order), root) for root in roots]
    heapq.heapify(pending)
    met: set[int] = set()
    inside = nodes_inside = 0
    first = min(begin for begin, _ in regions)
    for _ in range(MAX_NODES):
        if not pending:
            return None
        number, _, node = heapq.heappop(pending)
        number = -number
        if number in met:
            continue
        met.add(number)
        if issubclass(type(node), torch.autograd.function.BackwardCFunction):
            return None
        is_inside = any(begin <= number < end for begin, end in regions)
        nodes_inside += is_inside
        if _PRODUCT.match(node.name()):
            described = getattr(node, "_input_metadata", None)
            if not described or described[0].dtype != torch.float32:
                return None
            inside += is_inside
            if number < first:
                return inside if nodes_inside else None
        for below, _ in node.next_functions:
            if below is not None and below._sequence_nr() <= number:  # not a leaf
                heapq.heappush(pending, (-below._sequence_nr(), next(order), below))
        if inside and (not pending or -pending[0][0] < first):
            return inside
    return None
