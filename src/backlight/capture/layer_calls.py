"""Inputs and output gradients of layers in a forward and backward pass of the training run itself.

Calls are followed in the classes of the layers, from the begin to the end of one outermost forward; a hook of
the graph's node sees the gradient of the output when backward reaches it. Neither the graph nor the modules
change, and inputs are held by reference, as autograd holds those of most layers anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backlight.capture.batches import samples
from backlight.capture.call_hooks import CallHooks
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB, Listener
from backlight.capture.outside_modes import outside_modes
from backlight.devices import is_capturing_graph
from backlight.interrupts import is_interrupt


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
        self._depth = 0
        self._wanted = False

    def restart(self, *, wanted: bool) -> None:
        """Drop what is held; follow the next forward if it is ``wanted``."""
        self._hooks.leave()
        for call in self._calls:  # their graph may outlive the step
            call.x = None
        self._calls, self._open, self._depth, self._wanted = [], [], 0, wanted

    def forward_inputs(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Follow the layers of an outermost module."""
        self._depth += 1
        if self._depth > 1 or not self._wanted or HUB.backward_depth:
            return
        if torch.is_grad_enabled() and not is_transforming() and not is_capturing_graph():
            self._wanted = False
            layers = self._sink.begins(module, samples((args, kwargs)))
            self._hooks.follow(layer for layer in layers if layer is not module)
            if any(layer is module for layer in layers):  # its call has begun
                self._before(module, args, kwargs)

    def forward_outputs(self, module: nn.Module, result: Any) -> None:
        """Take the call of an outermost module that is itself a layer."""
        if self._depth == 1:
            self._after(module, result)

    def forward_end(self) -> None:
        """Follow no more once the outermost module is over."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
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
