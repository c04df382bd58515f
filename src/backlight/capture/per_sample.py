"""Input and output gradient of every call of chosen modules, handed to a sink while backward runs.

The output of a call passes through an identity of autograd that keeps the input by
``save_for_backward``, so that checkpointing frees and recomputes it like any other; its backward sees the
gradient of the output and hands both over. Nothing is written into ``.grad``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backlight.capture.hub import HUB


class Sink(Protocol):
    """Receiver of the calls."""

    def expect(self, module: nn.Module) -> None:
        """Note a call of ``module`` in the forward pass; its gradient follows if the loss depends on it."""

    def take(self, module: nn.Module, x: Tensor, delta: Tensor) -> None:
        """Take the input of a call and the gradient of its output, samples along the first dimension."""

    def skip(self, module: nn.Module, reason: str) -> None:
        """Note a call of ``module`` that cannot be separated by samples."""


class Tap(torch.autograd.Function):
    """The identity; its backward hands input and gradient to the sink."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, module: nn.Module, taps: Taps, dim: int) -> Tensor:
        """Return ``out``, and keep ``x`` as autograd keeps what a backward needs."""
        ctx.save_for_backward(x)
        ctx.module, ctx.taps, ctx.dim = module, taps, dim
        # A view made here could not be changed in place by what follows, a ReLU for example.
        if out.is_leaf or not _overlaps(out):
            ctx.mark_dirty(out)
            return out
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Hand over what was kept and the gradient, and pass the gradient on."""
        (x,) = ctx.saved_tensors
        ctx.taps.arrived(ctx.module, x, delta, ctx.dim)
        return delta, None, None, None, None


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Taps:
    """Forward hooks on ``modules``, whose first argument and only result are tensors, for as long as entered.

    N is ``samples``. A leading dimension of 1 is broadcast to N; one of N f holds f rows of each sample;
    where the second dimension is N and the first is not, samples lie along the second. The output of an
    embedding without a batch dimension is broadcast. ``without_grad`` is whether some call ran with gradients
    off, as in re-entrant checkpointing.
    """

    def __init__(self, modules: Iterable[nn.Module], samples: int, sink: Sink) -> None:
        self.modules = tuple(modules)
        self.samples = samples
        self.sink = sink
        self.without_grad = False
        self.forward = True
        self._handles: list[Any] = []

    def __enter__(self) -> Taps:
        for module in self.modules:
            self._handles.append(module.register_forward_hook(self._called, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor) or not isinstance(out, Tensor):
            self.sink.skip(module, "its input or its output is not a tensor")
            return None
        if self.forward:
            self.sink.expect(module)
        if not torch.is_grad_enabled():
            self.without_grad = True
            return None
        if not out.requires_grad:
            return None
        placed = self._placed(module, x, out)
        if placed is None:
            self.sink.skip(module, f"its input {list(x.shape)} has no dimension of {self.samples} samples")
            return None
        x, out, dim = placed
        return Tap.apply(out, x, module, self, dim)  # type: ignore[no-untyped-call]

    def _placed(self, module: nn.Module, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor, int] | None:
        """Return input and output with their sample dimension, or None where there is none."""
        n = self.samples
        lookup = isinstance(module, nn.Embedding)
        least = 1 if lookup else 2
        if x.dim() >= least and x.shape[0] == n:
            return x, out, 0
        if x.dim() > least and x.shape[1] == n and not isinstance(module, _CHANNELS):
            return x, out, 1
        if x.dim() >= least and x.shape[0] == 1:
            return x.expand(n, *x.shape[1:]), out.expand(n, *out.shape[1:]), 0
        if lookup and (x.dim() == 0 or x.shape[0] % n):
            return x.expand(n, *x.shape), out.expand(n, *out.shape), 0
        if x.dim() >= least and x.shape[0] and x.shape[0] % n == 0:
            return x, out, 0
        return None

    def arrived(self, module: nn.Module, x: Tensor, delta: Tensor, dim: int) -> None:
        """Hand a call over, with samples moved to the front."""
        with torch.no_grad(), torch.autocast(delta.device.type, enabled=False):
            if dim:
                x, delta = x.transpose(0, 1), delta.transpose(0, 1)
            self.sink.take(module, x.detach(), delta.detach())


_CHANNELS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
)  # fmt: skip
"""Modules whose second dimension is that of channels."""


def gradients(
    loss: Tensor, leaves: Sequence[Tensor], taps: Taps, *, others: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    """Return the gradients of ``loss`` with respect to ``leaves`` and leave every ``.grad`` as it was.

    Re-entrant checkpointing knows only ``backward``, which writes into ``.grad``: there the gradients are
    put aside, taken and put back, those of ``others`` (inputs that require one) as well, and hooks on
    accumulated gradients (optimizers in backward) are kept from running.
    """
    taps.forward = False
    if not taps.without_grad:
        return list(torch.autograd.grad(loss, leaves, allow_unused=True))
    return accumulated(loss, leaves, others=others)


def accumulated(
    loss: Tensor, leaves: Sequence[Tensor], *, others: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    """Return the gradients of ``loss`` by ``backward``, and leave those of ``leaves`` and ``others`` be."""
    with _put_aside([*leaves, *others]), _unwatched():
        torch.autograd.backward(loss)
        return [leaf.grad for leaf in leaves]


@contextlib.contextmanager
def _put_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    kept = [(leaf, leaf.grad) for leaf in leaves]
    hooks = [found for leaf in leaves if (found := getattr(leaf, "_post_accumulate_grad_hooks", None))]
    saved = [dict(found) for found in hooks]
    try:
        for leaf, _ in kept:
            leaf.grad = None
        for found in hooks:  # torch looks into the same dict at every call
            found.clear()
        yield
    finally:
        for leaf, grad in kept:
            leaf.grad = grad
        for found, values in zip(hooks, saved, strict=True):
            found.update(values)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Keep a watch of this process from counting this backward as one of the training run."""
    HUB.backward_depth += 1
    try:
        yield
    finally:
        HUB.backward_depth -= 1
