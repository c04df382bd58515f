"""What a capture reports while a training runs: one method per event, none of which waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Listener:
    """Receives the raw events of every training in the process; each method does nothing here.

    An exception out of a listener takes that listener off and never reaches the training; only
    :class:`BaseException` that is no :class:`Exception` (such as a requested end of the script)
    passes through.

    Attributes
    ----------
    spent:
        Host seconds that its methods have taken so far.
    """

    spent = 0.0

    def forward_begin(self) -> None:
        """An outermost module that is followed is called; see :mod:`backlight.capture.forward`."""

    def forward_end(self) -> None:
        """An outermost module that is followed has returned, or raised."""

    def samples_given(self, samples: int | None) -> None:
        """An outermost module was called with so many samples; None where unknown."""

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Outermost backward starts from ``roots``; empty where it starts from edges of a graph."""

    def backward_end(self) -> None:
        """Outermost backward is over, also when it raised."""

    def backward_raised(self, error: BaseException) -> None:
        """That backward, or computation of gradients, ends with ``error``; its end is reported after this."""

    def nested_begin(self) -> None:
        """A further backward, or computation of gradients, starts inside the outermost one."""

    def grad_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """``torch.autograd.grad`` starts from ``roots``, outside any backward."""

    def grad_end(self) -> None:
        """``torch.autograd.grad`` is over, also when it raised."""

    def scaled(self, loss: torch.Tensor, result: torch.Tensor) -> None:
        """A gradient scaler multiplied ``loss`` and returned ``result``."""

    def unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of ``optimizer`` were just divided by the loss scale."""

    def norm_begin(self) -> None:
        """The norm of all gradients is being computed, as clipping by norm does first."""

    def norm_end(self) -> None:
        """That norm is computed; clipping by it is still to come."""

    def clip_begin(
        self, kind: str, tensors: Sequence[torch.Tensor], limit: float, norm: torch.Tensor | None
    ) -> None:
        """Clipping of ``tensors`` (parameters or gradients) starts; ``kind`` is norm, value or refused."""

    def clip_end(self) -> None:
        """Clipping is over."""

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has just been constructed."""

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """``optimizer.step`` starts; with a closure the gradients are not there yet."""

    def closure_end(self, optimizer: torch.optim.Optimizer) -> None:
        """A closure has been evaluated inside ``optimizer.step``: the gradients are there."""

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step`` is over."""

    def scaler_begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` starts."""

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """``scaler.step(optimizer)`` is over; ``stepped`` says whether the optimizer was called."""

    def batch_begin(self, source: int) -> None:
        """A DataLoader is asked for a batch; ``source`` tells data sets apart."""

    def batch(self, index: int, seconds: float) -> None:
        """A DataLoader gave its batch number ``index`` after ``seconds`` of waiting."""

    def batch_missing(self) -> None:
        """A DataLoader that was asked had no batch left, or raised."""

    def dropped(self, error: Exception) -> None:
        """The listener raised ``error`` and has been taken off."""
