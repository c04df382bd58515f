"""Gradients that contain the scale of a gradient scaler, and what autocast changes."""

from __future__ import annotations

import heapq
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from backlight.capture.hooks import scale_of
from backlight.capture.loss_graph import sequence_number
from backlight.capture.optimizers import parameters_of
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.model.facts import Fact
from backlight.monitors.correctness.rules import mixed_precision as facts

if TYPE_CHECKING:
    pass


class MixedPrecision(Check):
    """``mixed_precision``: gradients with the loss scale in them that are clipped, or used in a step."""

    name = "mixed_precision"

    def _start(self) -> None:
        self._scale: torch.Tensor | None = None  # that the gradients contain, and nothing has removed
        self._clipped: tuple[str, float] | None = None
        self._is_inside = False
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def scaled(self, scaler: Any, loss: torch.Tensor, result: torch.Tensor) -> None:
        """From the next backward on gradients contain the scale."""
        scale = scale_of(scaler)
        self._scale = None if scale is None else scale.detach()

    def backward_end(self) -> None:
        """Note the gradients as they are: a script may divide them by the scale itself."""
        self._versions = []
        if self.due and self._scale is not None:
            for optimizer in self.run.scope.optimizers():
                gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None][:1]
                self._versions += [(weakref.ref(g), g._version) for g in gradients]

    def unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Gradients have their true size."""
        self._scale = None

    def clip_begin(
        self, kind: str, tensors: Sequence[torch.Tensor], limit: float, norm: torch.Tensor | None
    ) -> None:
        """Note a limit that is applied to scaled gradients."""
        if self._scale is not None and kind != "refused":
            self._clipped = (kind, limit)

    def scaler_begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report clipping, now that the scaler is what takes the step."""
        self._is_inside = True
        clipped, self._clipped = self._clipped, None
        if self.due and clipped is not None and self._scale is not None:
            kind, limit = clipped
            self._report_scale(
                self._scale, partial(facts.ClippedBeforeUnscale, clipping=kind, limit=float(limit))
            )

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """The step is over."""
        self._scale, self._is_inside = None, False

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Report a step without the scaler, of gradients that no one has written since backward."""
        if self._is_inside or self._scale is None or not self._versions:
            return
        as_left = all(
            (gradient := reference()) is not None and gradient._version == version
            for reference, version in self._versions
        )
        scale, self._scale = self._scale, None
        if self.due and as_left and self.run.scope.holds(optimizer):
            self._report_scale(scale, partial(facts.ScalerBypassed, optimizer=type(optimizer).__name__))

    def _report_scale(self, scale: torch.Tensor, fact: Callable[..., Fact]) -> None:
        step = self.step

        def report(factor: NDArray[np.generic]) -> None:
            if (value := float(factor.reshape(()))) != 1.0:
                self.report(fact(step=step, scale=value))

        self.when_known(report, scale.clone())


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

    name = "autocast_effect"

    def _start(self) -> None:
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
        regions, self._regions = [region for region in self._regions if region[0] < region[1]], []
        if not regions or not self._left:
            return
        self._left -= 1
        inside = _products([root.grad_fn for root in roots if root.grad_fn is not None], regions)
        if inside is not None:
            self.report(facts.AutocastWithoutEffect(self.step, self._device, self._dtype, inside))


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
