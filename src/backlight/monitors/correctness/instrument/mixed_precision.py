"""The order of calls of a gradient scaler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backlight.capture.hooks import scale_of
from backlight.monitors.correctness.instrument.check import Check

if TYPE_CHECKING:
    import torch

    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule


class MixedPrecision(Check):
    """``clipped_before_unscale``: gradients were clipped while they still contained the loss scale."""

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._is_scaled = False
        self._clipped: tuple[str, float] | None = None

    def forget(self) -> None:
        """Drop a limit that no step was taken with."""
        self._is_scaled, self._clipped = False, None

    def scaled(self, loss: torch.Tensor, result: torch.Tensor) -> None:
        """From here on gradients contain the scale."""
        self._is_scaled = True

    def unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Gradients have their true size."""
        self._is_scaled = False

    def clip_begin(
        self, kind: str, tensors: Sequence[torch.Tensor], limit: float, norm: torch.Tensor | None
    ) -> None:
        """Note a limit that is applied to scaled gradients."""
        if self._is_scaled and kind != "refused":
            self._clipped = (kind, limit)

    def scaler_begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report, now that the scaler is what takes the step."""
        clipped, self._clipped = self._clipped, None
        scale = scale_of(scaler)
        if not self.due or clipped is None or scale is None:
            return
        step, (kind, limit) = self.run.clock.index, clipped
        self.when_known(
            scale.detach().clone().reshape(1),
            lambda known: (
                self.report("clipped_before_unscale", step, kind=kind, limit=limit, scale=float(known[0]))
                if known[0] != 1
                else None
            ),
        )

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """The step is over."""
        self._is_scaled = False
