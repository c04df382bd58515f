"""Outputs of layers, and the gradients that arrive there, in a forward and backward pass of the training run.

Calls are followed in the classes of the layers, from the begin to the end of one outermost forward of each
model; a hook of the node in the graph takes the gradient of the output when backward reaches it. Nothing of
either is held but numbers, which stay on their device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from backlight import clock
from backlight.capture.batches import samples, tensors_in
from backlight.capture.call_hooks import CallHooks
from backlight.capture.checkpoint_regions import CheckpointedRegion
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB, Listener
from backlight.capture.modules import inner, is_compiled, kind_of, table_of
from backlight.capture.training_threads import outside_modes
from backlight.devices import is_capturing_graph
from backlight.interrupts import is_interrupt
from backlight.measure import activations as measure
from backlight.user_code import user_line

MAX_LAYERS = 400
"""Layers of a model that are followed."""

MAX_FORWARDS = 16
"""Forwards of a model that are measured in a step until a backward pass reaches one."""

MAX_CALLS = 4
"""Calls of one layer in a forward pass that are measured, each on its own."""

PASSED_ON = frozenset({"Identity", "Flatten", "Unflatten"})
"""Classes whose output has the values of their input."""

NO_UNITS = ("Drop", "Pad", "Pool", "Embedding")
"""Parts of the names of classes whose zeros are meant, or are no units."""

_DENSE = (Tensor, nn.Parameter)


@dataclass(eq=False)
class LayerOutput:
    """One call of a layer: what is known at once, and numbers on the device.

    ``name`` is that of the module, with ``#2`` for its second call in the forward. ``input`` names the layer
    whose output it was given, where that is one of these. ``rows`` are values per unit, ``unit`` is the
    dimension of the units, None where there are none. ``in_region`` is whether re-entrant checkpointing hides
    the graph of its output. ``low`` and ``high`` are the extremes of each unit,
    ``spread`` is how far samples differ, ``zeros`` counts values.
    """

    name: str
    kind: str
    numel: int
    rows: int
    unit: int | None
    has_parameters: bool
    in_region: bool
    input: str
    line: str
    norm: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    zeros: Tensor | None = None
    saturated: Tensor | None = None
    spread: Tensor | None = None
    input_spread: Tensor | None = None
    rank: Tensor | None = None
    gradient: Tensor | None = None
    gradient_low: Tensor | None = None
    gradient_high: Tensor | None = None


@dataclass(eq=False)
class ForwardPass:
    """The outputs of one forward of a root module, in the order in which the calls ended.

    ``model`` is the prefix of its names. ``has_gradient`` is whether a backward pass has reached any of them;
    ``is_over`` that nothing is taken any more.
    """

    model: str
    outputs: list[LayerOutput] = field(default_factory=list)
    has_gradient: bool = False
    is_over: bool = False


@dataclass(frozen=True)
class FollowedLayer:
    """A module to follow; ``is_compiled`` says that nothing inside of it can be."""

    name: str
    module: nn.Module
    is_compiled: bool = False


def layers_of(root: nn.Module, prefix: str) -> list[FollowedLayer]:
    """Return the leaf modules of a model, its blocks, and what is compiled or scripted as a whole.

    Blocks are the members of containers, such as the layers of a transformer.
    """
    layers: list[FollowedLayer] = []
    stack: list[tuple[str, nn.Module, bool]] = [(prefix, root, False)]
    visited: set[int] = set()
    while stack:
        name, module, is_member = stack.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
            layers.append(FollowedLayer(name or kind_of(module), module, is_compiled=True))
            continue
        if (wrapped := inner(module)) is not None:
            stack.append((name, wrapped, is_member))
            continue
        children = [(key, child) for key, child in table_of(module, "_modules").items() if child is not None]
        is_container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        is_layer = not children or is_member or isinstance(module, nn.MultiheadAttention)
        if is_layer and not is_container and kind_of(module) not in PASSED_ON:
            layers.append(FollowedLayer(name or kind_of(module), module))
        stack += [
            (f"{name}.{key}" if name else key, child, is_container) for key, child in reversed(children)
        ]
    return layers


class OutputCalls(Listener):
    """Measures a forward with gradients of each model after :meth:`restart`, where that is wanted.

    It is the last one before the first backward pass that reaches it: an agent may choose actions before.

    ``layers`` returns the prefix of a root module and what to follow of it, ``on_error`` takes an error in a
    hook, after which nothing more is measured. ``seconds`` is the processor time since :meth:`restart`,
    ``left_out`` are the classes of tensors that were not measured.
    """

    every_step = False

    def __init__(
        self,
        layers: Callable[[nn.Module], tuple[str, Sequence[FollowedLayer]]],
        on_error: Callable[[Exception], None],
        *,
        wants_rank: bool,
    ) -> None:
        self._layers, self._on_error, self._wants_rank = layers, on_error, wants_rank
        self._hooks = CallHooks(self._before, self._after)
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wanted, self._passes, self._forwards = False, dict[int, ForwardPass](), Counter[int]()
        self.seconds, self.left_out, self._lines = 0.0, set[str](), dict[str, str]()
        self._clear()

    def _clear(self) -> None:
        self._open: list[tuple[nn.Module, Tensor | None]] = []
        self._names: dict[int, str] = {}
        self._calls: Counter[int] = Counter()
        self._units: dict[tuple[int, ...], int] = {}
        self._spreads: dict[int, tuple[weakref.ref[Tensor], str, Tensor | None]] = {}
        self._samples: int | None = None
        self._in_region = False

    def restart(self, *, wanted: bool) -> None:
        """Drop what was measured; follow the next forwards if they are ``wanted``."""
        self._hooks.leave()
        for forward in self._passes.values():  # their graph may outlive the step
            forward.is_over = True
        self._wanted, self._passes, self._forwards, self.seconds = wanted, {}, Counter(), 0.0
        self._clear()

    def passes(self) -> list[ForwardPass]:
        """Return the forwards that a backward pass has reached: others are no part of the training."""
        return [forward for forward in self._passes.values() if forward.has_gradient]

    # Events of the outermost module

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Follow the layers of a model that is about to train."""
        if not self._wanted or HUB.forward_depth > 1 or HUB.backward_depth:
            return
        earlier = self._passes.get(id(module))
        if self._forwards[id(module)] >= MAX_FORWARDS or (earlier is not None and earlier.has_gradient):
            return
        if not torch.is_grad_enabled() or is_transforming() or is_capturing_graph():
            return
        if module.training:
            self._trained.add(module)
        elif module in self._trained:  # it is evaluated, with gradients
            return
        begin = clock.thread_time()
        self._clear()
        self._forwards[id(module)] += 1
        if earlier is not None:
            earlier.is_over = True
        model, layers = self._layers(module)
        if module not in self._compiled and any(layer.is_compiled for layer in layers):
            # What is compiled while a class is replaced is compiled again when it is not.
            self._compiled.add(module)
            self._forwards[id(module)] = MAX_FORWARDS
            return
        self._passes[id(module)] = self._forward = ForwardPass(model)
        self._samples = samples((args, kwargs))
        self._names = {id(layer.module): layer.name for layer in layers}
        self._hooks.follow(layer.module for layer in layers if layer.module is not module)
        if id(module) in self._names:  # its call has begun
            self._before(module, args, kwargs)
        self.seconds += clock.thread_time() - begin

    def forward_end(self, module: nn.Module, result: Any) -> None:
        """Follow no more once the outermost module is over."""
        if HUB.forward_depth == 1 and self._names:
            self._after(module, result)
            self._hooks.leave()
            self._clear()

    def region_begin(self, region: CheckpointedRegion) -> None:
        """Measure a re-entrant region too, whose forward has no gradients."""
        self._in_region = self._in_region or region.is_reentrant

    def region_end(self, region: CheckpointedRegion) -> None:
        """Leave it."""
        if region.is_reentrant:
            self._in_region = False

    # Calls of layers

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        values = (*args, *kwargs.values()) if kwargs else args
        self._open.append((layer, next((value for value in values if _is_measurable(value)), None)))

    def _after(self, layer: nn.Module, result: Any) -> None:
        if not self._open or self._open[-1][0] is not layer:
            return
        _, x = self._open.pop()
        is_training = torch.is_grad_enabled() or self._in_region
        if result is None or not is_training or is_transforming() or HUB.backward_depth:
            return
        begin = clock.thread_time()
        try:
            output = result if type(result) is Tensor else next(iter(tensors_in(result)), None)
            if _is_measurable(output) and self._calls[id(layer)] < MAX_CALLS:
                self._calls[id(layer)] += 1
                with _aside(output.device):
                    self._measure(layer, x, output)
            elif output is not None and type(output) not in _DENSE:
                self.left_out.add(type(output).__name__)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._fail(error)
        self.seconds += clock.thread_time() - begin

    def _fail(self, error: Exception) -> None:
        self.restart(wanted=False)
        self._on_error(error)

    def _measure(self, layer: nn.Module, x: Tensor | None, output: Tensor) -> None:
        forward, number, kind = self._forward, self._calls[id(layer)], kind_of(layer)
        name = self._names[id(layer)] + (f"#{number}" if number > 1 else "")
        _, origin, input_spread = self._spread_of(x) if x is not None else (None, "", None)
        y = output.detach()
        if name not in self._lines:  # it takes longer than the numbers
            self._lines[name] = str(user_line() or "")
        has_parameters = bool(table_of(layer, "_parameters"))
        unit = self._unit(layer, y, has_parameters=has_parameters)
        low, high = measure.extremes(y)
        is_batch = self._samples is not None and len(y) == self._samples > 1
        spread = measure.spread(low, high) if is_batch else None
        self._spreads[id(output)] = weakref.ref(output), name, spread
        measured = LayerOutput(
            name, kind, y.numel(), y.numel() // (1 if unit is None else y.shape[unit]), unit, has_parameters,
            self._in_region, origin, self._lines[name], measure.norm(y),
            spread=spread, input_spread=input_spread,
        )  # fmt: skip
        if unit is not None and not any(part in kind for part in NO_UNITS):
            measured.low, measured.high = measure.by_unit(low, high, unit - 1)
        if not has_parameters:
            measured.zeros = measure.zeros(y)
        if (bounds := bounds_of(layer, kind)) is not None:
            measured.saturated = measure.saturated(y, kind, *bounds)
        if self._wants_rank and unit is not None and y.numel() > y.shape[unit]:
            measured.rank = measure.effective_rank(y, unit)
        forward.outputs.append(measured)
        if output.grad_fn is not None:
            # A hook of the node: one of the tensor would go with it into copies, and warn where it is saved.
            hook = partial(_arrived, self, forward, measured, output.output_nr)
            output.grad_fn.register_prehook(hook)

    def _spread_of(self, x: Tensor) -> tuple[weakref.ref[Tensor], str, Tensor | None]:
        """Return how far the samples of an input differ, and the name of the layer that it comes from."""
        entry = self._spreads.get(id(x))
        if entry is None or entry[0]() is not x:  # the id of one that is gone
            spread = None
            if self._samples is not None and x.ndim and len(x) == self._samples > 1:
                spread = measure.spread(*measure.extremes(x.detach()))
            entry = self._spreads[id(x)] = weakref.ref(x), "", spread
        return entry

    def _unit(self, layer: nn.Module, y: Tensor, *, has_parameters: bool) -> int | None:
        """Return the dimension of the units of an output; an activation has that of the layer before it."""
        shape = tuple(y.shape)
        unit: int | None
        if isinstance(layer, nn.modules.conv._ConvNd):
            unit = y.ndim - 1 - len(layer.kernel_size)
        elif isinstance(layer, (nn.modules.batchnorm._NormBase, nn.GroupNorm)):
            unit = 1
        elif has_parameters:
            weight = table_of(layer, "_parameters").get("weight")
            is_first = weight is not None and y.ndim > 2 and len(weight) not in {0, shape[-1]}
            unit = 1 if weight is not None and is_first and len(weight) == shape[1] else y.ndim - 1
        else:
            unit = self._units.get(shape, 1 if y.ndim > 3 else y.ndim - 1)
        if not 0 < unit < y.ndim:  # without a dimension of samples
            return None
        if has_parameters:
            self._units[shape] = unit
        return unit

    def take(self, forward: ForwardPass, output: LayerOutput, delta: Tensor) -> None:
        """Measure the gradient of an output, while backward runs."""
        begin = clock.thread_time()
        try:
            with _aside(delta.device):
                output.gradient = measure.norm(delta)
                if output.has_parameters and output.low is not None and output.unit is not None:
                    extremes = measure.extremes(delta)
                    output.gradient_low, output.gradient_high = measure.by_unit(*extremes, output.unit - 1)
                forward.has_gradient = True
        except Exception as error:
            if is_interrupt(error):
                raise
            self._fail(error)
        self.seconds += clock.thread_time() - begin


def _arrived(
    calls: OutputCalls,
    forward: ForwardPass,
    output: LayerOutput,
    number: int,
    gradients: tuple[Tensor | None, ...],
) -> None:
    if forward.is_over or output.gradient is not None or torch.compiler.is_compiling():
        return
    delta = gradients[number]
    if _is_measurable(delta):
        calls.take(forward, output, delta.detach())


def _is_measurable(value: Any) -> TypeGuard[Tensor]:
    """Return whether ``value`` is a tensor of real numbers that has memory here."""
    return (
        isinstance(value, Tensor)
        and type(value) in _DENSE
        and value.layout is torch.strided
        and value.dtype in measure.MEASURED_TYPES
        and value.ndim > 0
        and value.numel() > 0
        and value.device.type != "meta"
        and not value.is_inference()
    )


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Compute on a device without the modes of the script."""
    with (
        outside_modes(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


Bounds = tuple[float | None, float | None, int | None]


def bounds_of(layer: nn.Module, kind: str) -> Bounds | None:
    """Return between which values a layer is not saturated, and the dimension of a softmax."""
    if kind in measure.INTERVALS:
        return (*measure.INTERVALS[kind], None)
    if isinstance(layer, nn.Hardtanh):
        return layer.min_val, layer.max_val, None
    if isinstance(layer, (nn.Softmax, nn.Softmax2d)):
        return None, None, getattr(layer, "dim", None)
    return None
