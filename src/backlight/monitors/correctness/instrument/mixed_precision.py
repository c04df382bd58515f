"""What is done with gradients that contain the scale of a gradient scaler."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backlight.capture.hooks import scale_of
from backlight.capture.seen_optimizers import parameters_of
from backlight.monitors.correctness.instrument.check import Check

if TYPE_CHECKING:
    import torch

    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule


class MixedPrecision(Check):
    """``mixed_precision``: gradients with the loss scale in them that are clipped, or used in a step."""

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
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
            self._report_scale("clipped_before_unscale", self._scale, clipping=kind, limit=limit)

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
            self._report_scale("scaler_bypassed", scale, optimizer=type(optimizer).__name__)

    def _report_scale(self, kind: str, scale: torch.Tensor, **facts: Any) -> None:
        step = self.run.clock.index

        def report(known: NDArray[np.generic]) -> None:
            if (value := float(known.reshape(()))) != 1.0:
                self.report("mixed_precision", step, kind=kind, scale=value, **facts)

        self.when_known(report, scale.clone())
