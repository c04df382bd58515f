"""Input and output gradient of every call of chosen modules, handed to a sink while backward runs.

The output of a call passes through an identity of autograd that keeps the input by
``save_for_backward``, so that checkpointing frees and recomputes it like any other; its backward sees the
gradient of the output and hands both over. Nothing is written into ``.grad``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backlight.capture.batches import samples
from backlight.capture.call_hooks import CallHooks
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB, Listener
from backlight.capture.training_threads import outside_modes
from backlight.devices import is_capturing_graph
from backlight.interrupts import is_interrupt

# Inputs and output gradients of layers in a forward and backward pass of the training run itself.
#
# Calls are followed in the classes of the layers, from the begin to the end of one outermost forward; a hook
# of the graph's node sees the gradient of the output when backward reaches it. Neither the graph nor the
# modules change, and inputs are held by reference, as autograd holds those of most layers anyway.


class LayerSink(Protocol):
    """Receiver of the calls of one forward pass."""

    def begins(self, module: nn.Module, samples: int | None) -> Sequence[nn.Module]:
        """Return the layers to follow in a forward pass of the outermost ``module``."""

    def skips(self, layer: nn.Module, reason: str) -> None:
        """Note a call whose gradient will not arrive."""

    def arrives(self, layer: nn.Module, x: Tensor, delta: Tensor) -> None:
        """Take the input of a call and the gradient of its output, while backward runs."""

    def trouble(self, error: Exception) -> None:
        """Something here failed: nothing more comes."""


class LayerCall:
    """A call whose gradient is awaited; ``x`` is None once it is over or given up."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        self.layer = weakref.ref(layer)
        self.x: Tensor | None = x
        self.version = x._version


class LayerCalls(Listener):
    """Follows the first forward with gradients after :meth:`restart`, where that one is wanted.

    Checkpointed regions are not followed: holding their inputs would cost the memory that they save.
    """

    every_step = False

    def __init__(self, sink: LayerSink) -> None:
        self._sink = sink
        self._hooks = CallHooks(self._before, self._after)
        self._open: list[tuple[nn.Module, Any]] = []
        self._calls: list[LayerCall] = []
        self._wanted = False

    def restart(self, *, wanted: bool) -> None:
        """Drop what is held; follow the next forward if it is ``wanted``."""
        self._hooks.leave()
        for call in self._calls:  # their graph may outlive the step
            call.x = None
        self._calls, self._open, self._wanted = [], [], wanted

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Follow the layers of an outermost module."""
        if HUB.forward_depth > 1 or not self._wanted or HUB.backward_depth:
            return
        if torch.is_grad_enabled() and not is_transforming() and not is_capturing_graph():
            self._wanted = False
            layers = self._sink.begins(module, samples((args, kwargs)))
            self._hooks.follow(layer for layer in layers if layer is not module)
            if any(layer is module for layer in layers):  # its call has begun
                self._before(module, args, kwargs)

    def forward_end(self, module: nn.Module, result: Any) -> None:
        """Follow no more once the outermost module is over, which may itself be a layer."""
        if HUB.forward_depth == 1:
            self._after(module, result)
            self._hooks.leave()
            self._open = []

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._open.append((layer, args[0] if args else next(iter(kwargs.values()), None)))

    def _after(self, layer: nn.Module, result: Any) -> None:
        if not self._open or self._open[-1][0] is not layer:
            return
        _, x = self._open.pop()
        if result is None or is_transforming():
            return
        if not isinstance(x, Tensor) or not isinstance(result, Tensor):
            self._sink.skips(layer, "its input or its output is not a tensor")
        elif not torch.is_grad_enabled() or _saves_elsewhere():
            self._sink.skips(layer, "it is in a checkpointed region, or its saved tensors are replaced")
        elif result.grad_fn is not None:
            call = LayerCall(layer, x.detach())
            self._calls.append(call)
            # A hook of the node: one of the tensor would go with it into copies, and warn where it is saved.
            result.grad_fn.register_prehook(partial(_arrived, self._sink, call, result.output_nr))


def _saves_elsewhere() -> bool:
    """Return whether hooks replace what autograd saves, as those of checkpointing do."""
    top: Callable[[bool], Any] | None
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def _arrived(sink: LayerSink, call: LayerCall, output: int, gradients: tuple[Tensor | None, ...]) -> None:
    delta, x, layer = gradients[output], call.x, call.layer()
    if delta is None or x is None or layer is None or torch.compiler.is_compiling():
        return
    try:
        if x._version != call.version:
            sink.skips(layer, "its input was changed in place before backward")
        else:
            with outside_modes(), torch.no_grad(), torch.autocast(delta.device.type, enabled=False):
                call.x = None
                sink.arrives(layer, x, delta.detach())
    except Exception as error:
        if is_interrupt(error):
            raise
        sink.trouble(error)


Call = tuple[int, tuple[int, ...]]
"""Number of a module, and the shape of its input."""


class SampleSink(Protocol):
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
    def forward(
        ctx: Any, out: Tensor, x: Tensor, anchor: Tensor, module: nn.Module, taps: Taps, dim: int
    ) -> Tensor:
        """Return ``out``, and keep ``x`` as autograd keeps what a backward needs."""
        ctx.save_for_backward(x)
        ctx.module, ctx.taps, ctx.dim = module, taps, dim
        # A view made here could not be changed in place by what follows, a ReLU for example.
        if out.is_leaf or not _overlaps(out):
            ctx.mark_dirty(out)
            return out
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """Hand over what was kept and the gradient, and pass the gradient on."""
        (x,) = ctx.saved_tensors
        ctx.taps.arrived(ctx.module, x, delta, ctx.dim)
        return delta, None, None, None, None, None


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Taps:
    """Forward hooks on ``modules``, whose first argument and only result are tensors, for as long as entered.

    N is ``samples``. ``sample_calls`` are of a forward pass of one sample: the dimension in which an input
    differs from it is that of the samples, and one that does not differ is shared by all of them. Where that
    is not known, a leading dimension of N f holds f rows of each sample; where the second dimension is N and
    the first is not, samples lie along the second; a leading dimension of 1, and an embedding without a batch
    dimension, are shared. What is shared is broadcast to N; without ``broadcast`` such calls are skipped:
    what follows in the model may need the shape that they have. With no ``sink`` calls are only noted.

    Attributes
    ----------
    calls:
        Number of the module and shape of its input, for each call of the forward pass.
    broadcasts:
        Whether an output was broadcast.
    without_grad:
        Whether some call ran with gradients off, as in re-entrant checkpointing.
    anchor:
        A leaf that every call depends on: a backward for it alone reaches all of them.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        samples: int,
        sink: SampleSink | None,
        *,
        sample_calls: Sequence[Call] = (),
        broadcast: bool = True,
    ) -> None:
        self.modules = tuple(modules)
        self.samples = samples
        self.sink = sink
        self.calls: list[Call] = []
        self.broadcasts = False
        self.without_grad = False
        self.forward = True
        self.anchor = torch.zeros((), requires_grad=True)
        self._sample_calls, self._broadcast = sample_calls, broadcast
        self._dims: dict[Call, int | None] = {}
        self._numbers = {id(module): number for number, module in enumerate(self.modules)}
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
        if self.forward and isinstance(x, Tensor):
            call = self._numbers[id(module)], tuple(x.shape)
            self.calls.append(call)
            self._dims[call] = self._probed(module, x)
        if self.sink is None:
            return None
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
            reason = "is shared by all samples, and its output takes another shape"
            if not self.broadcasts or self._broadcast:
                reason = f"has no dimension of {self.samples} samples"
            self.sink.skip(module, f"its input {list(x.shape)} {reason}")
            return None
        x, out, dim = placed
        return Tap.apply(out, x, self.anchor, module, self, dim)  # type: ignore[no-untyped-call]

    def _placed(self, module: nn.Module, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor, int] | None:
        """Return input and output with their sample dimension, or None where there is none."""
        dim = self._dims.get((self._numbers[id(module)], tuple(x.shape)), _UNKNOWN)
        if dim == _UNKNOWN:
            dim = self._guessed(module, x)
        if dim != _SHARED:
            return None if dim is None else (x, out, dim)
        self.broadcasts = True
        if not self._broadcast:
            return None
        n, lookup = self.samples, isinstance(module, nn.Embedding)
        if x.shape[:1] == (1,) and x.dim() >= (1 if lookup else 2):
            return x.expand(n, *x.shape[1:]), out.expand(n, *out.shape[1:]), 0
        return (
            None if isinstance(module, _CHANNELS) else (x.expand(n, *x.shape), out.expand(n, *out.shape), 0)
        )

    def _probed(self, module: nn.Module, x: Tensor) -> int | None:
        """Return the sample dimension that the same call of one sample shows."""
        n, number = self.samples, len(self.calls) - 1
        called, shape = self._sample_calls[number] if number < len(self._sample_calls) else (-1, ())
        if called != self._numbers[id(module)] or len(shape) != x.dim() or n == 1:
            return _UNKNOWN
        changed = [i for i, (single, now) in enumerate(zip(shape, x.shape, strict=True)) if single != now]
        if not changed:
            return _SHARED
        dim = changed[0]
        if len(changed) > 1 or x.shape[dim] != n * shape[dim]:
            return _UNKNOWN
        if dim == 1 and (shape[1] != 1 or isinstance(module, _CHANNELS)):
            return None
        return dim if dim < 2 else None

    def _guessed(self, module: nn.Module, x: Tensor) -> int | None:
        n = self.samples
        lookup = isinstance(module, nn.Embedding)
        least = 1 if lookup else 2
        if x.dim() >= least and x.shape[0] == n:
            return 0
        if x.dim() > least and x.shape[1] == n and not isinstance(module, _CHANNELS):
            return 1
        if (x.dim() >= least and x.shape[0] == 1) or (lookup and (x.dim() == 0 or x.shape[0] % n)):
            return _SHARED
        return 0 if x.dim() >= least and x.shape[0] and x.shape[0] % n == 0 else None

    def arrived(self, module: nn.Module, x: Tensor, delta: Tensor, dim: int) -> None:
        """Hand a call over, with samples moved to the front."""
        assert self.sink is not None
        if self.forward:
            self.sink.skip(module, "the loss function differentiates through it, as a gradient penalty does")
            return
        with torch.no_grad(), torch.autocast(delta.device.type, enabled=False):
            if dim:
                x, delta = x.transpose(0, 1), delta.transpose(0, 1)
            self.sink.take(module, x.detach(), delta.detach())


_SHARED, _UNKNOWN = -1, -2
"""Instead of a sample dimension: an input that all samples share, and one of which nothing is known."""

_CHANNELS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
)  # fmt: skip
"""Modules whose second dimension is that of channels."""


def gradients(
    loss: Tensor, leaves: Sequence[Tensor], taps: Taps, *, others: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    """Return the gradients of ``loss`` with respect to ``leaves`` and leave every ``.grad`` as it was.

    Every call that ``taps`` noted is reached, whatever the leaves.

    Re-entrant checkpointing knows only ``backward``, which writes into ``.grad``: there the gradients are
    put aside, taken and put back, those of ``others`` (inputs that require one) as well, and hooks on
    accumulated gradients (optimizers in backward) are kept from running.
    """
    taps.forward = False
    if not taps.without_grad:
        *grads, _ = torch.autograd.grad(loss, [*leaves, taps.anchor], allow_unused=True)
        return list(grads)
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
    hooks = [hooks_of for leaf in leaves if (hooks_of := getattr(leaf, "_post_accumulate_grad_hooks", None))]
    saved = [dict(table) for table in hooks]
    try:
        for leaf, _ in kept:
            leaf.grad = None
        for hooks_of in hooks:  # torch looks into the same dict at every call
            hooks_of.clear()
        yield
    finally:
        for leaf, grad in kept:
            leaf.grad = grad
        for hooks_of, values in zip(hooks, saved, strict=True):
            hooks_of.update(values)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Keep a watch of this process from counting this backward as one of the training run."""
    HUB.backward_depth += 1
    try:
        yield
    finally:
        HUB.backward_depth -= 1
