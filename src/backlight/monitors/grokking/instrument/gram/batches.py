"""A batch as samples: how many there are, and some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.capture.batches import map_tensors, tensors
from backlight.monitors.grokking.instrument.gram.checks import GramError


def count(batch: Any) -> int:
    """Return N, the length of the first dimension of the batch's tensors."""
    sizes = {f"batch{path}": tensor.shape[0] for path, tensor in tensors(batch) if tensor.dim()}
    if not sizes:
        raise GramError(
            f"gram: the batch holds no tensor with a first dimension, got {type(batch).__name__}; "
            "give tensors, or tuples, lists and dicts of them, with samples along the first dimension"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path} {size}" for path, size in sizes.items())
        raise GramError(
            f"gram: samples must lie along the first dimension of every tensor of the batch, got {listed}; "
            "transpose the batch, and turn it back within loss_fn"
        )
    n = next(iter(sizes.values()))
    if not n:
        raise GramError("gram: the batch holds no sample; expected at least one along the first dimension")
    return n


def some(batch: Any, index: Tensor) -> Any:
    """Return the samples of ``index`` ``[n]``."""
    return map_tensors(
        batch,
        lambda tensor: (
            tensor.detach().index_select(0, index.to(tensor.device)).requires_grad_(tensor.requires_grad)
        ),
    )


def between(batch: Any, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop``."""
    return map_tensors(batch, lambda tensor: tensor[start:stop])


def scalar(loss: Any) -> Tensor:
    """Return ``loss`` if it is what a loss function must return."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise GramError(
            f"gram: loss_fn(model, batch) must return one real number, the sum over samples, got {got}; "
            "return losses.sum()"
        )
    if not loss.requires_grad:
        raise GramError(
            "gram: the loss depends on no parameter that requires a gradient; compute it with gradients on, "
            "without detach() or item()"
        )
    if not bool(torch.isfinite(loss)):
        raise GramError(f"gram: the loss is {float(loss.detach())}; `backlight nan` finds its origin")
    return loss.reshape(())
