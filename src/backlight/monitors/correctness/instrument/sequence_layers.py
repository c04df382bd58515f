"""What recurrent layers and attention get: states without a graph, and samples where they take time."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import tensors_in
from backlight.capture.functional_calls import compiler_has_run, is_traced
from backlight.capture.hooks import Patches, is_transforming
from backlight.capture.loss_graph import CLASS_LOSSES, Node, first_input, kinds, shape_of, terms
from backlight.capture.modules import named_parameters
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules.graph_shapes import SamplesAsTime, StateWithoutGraph
from backlight.user_code import user_line

LAYERS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell, nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention)

_OTHER_LOSSES = kinds("MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits")

LOOKS = 2
"""Losses whose forwards are observed."""

MIN_CALLS = 3
"""Calls of a layer within one loss from which on the states between them show what is meant."""


@dataclass
class _Calls:
    """Calls of one layer within a loss; ``states`` are the last ones that it returned."""

    layer: nn.Module
    count: int = 0
    cut: int = 0  # calls that got the last state without its graph
    line: str = ""
    states: list[Tensor] = field(default_factory=list)


class SequenceLayers(Check):
    """``loss_input``: the calls of a recurrent layer do not share a graph, or it takes samples for time."""

    name = "sequence_layers"
    steps = "first"

    def _start(self) -> None:
        self._patches = Patches()
        self._calls: dict[int, _Calls] = {}
        self._shapes: dict[int, tuple[nn.Module, tuple[int, ...], str]] = {}
        self._left, self._is_on = LOOKS, False

    def forget(self) -> None:
        """Observe no longer."""
        self._patches.undo()
        self._calls.clear()
        self._shapes.clear()
        self._is_on = False

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Observe the recurrent layers of this forward, unless something is compiled in this process."""
        if self._left and not self._is_on and torch.is_grad_enabled() and not compiler_has_run():
            self._is_on = True
            for layer in LAYERS:
                self._patches.replace(layer, "forward", self._wrapped)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(layer, *args, **kwargs)
            is_plain = not (is_traced() or is_transforming() or is_capturing_graph())
            if self._is_on and is_plain and torch.is_grad_enabled():
                names = ("query",) if isinstance(layer, nn.MultiheadAttention) else ("input", "hx")
                named = dict(zip(names, args, strict=False)) | kwargs
                self._note_axis(layer, named.get(names[0]))
                if isinstance(layer, nn.RNNCellBase | nn.RNNBase):
                    self._note_state(layer, tensors_in(named.get("hx")), result)
            return result

        return forward

    def _note_axis(self, layer: nn.Module, sequence: Any) -> None:
        """Note the shape of a sequence of which a layer takes the first axis as time."""
        takes_time_first = getattr(layer, "batch_first", None) is False
        if takes_time_first and getattr(sequence, "ndim", 0) == 3 and id(layer) not in self._shapes:
            line = str(user_line(sys._getframe(2)) or "")
            self._shapes[id(layer)] = (layer, tuple(sequence.shape), line)

    def _note_state(self, layer: nn.Module, states: list[Tensor], result: Any) -> None:
        calls = self._calls.setdefault(id(layer), _Calls(layer))
        calls.count += 1
        is_same = len(states) == len(calls.states) > 0
        if is_same and all(map(_is_without_graph, states, calls.states)):
            calls.cut += 1
            calls.line = calls.line or str(user_line(sys._getframe(2)) or "")
        returned = tensors_in(result if isinstance(layer, nn.RNNCellBase) else result[1])
        # Without their graphs: what is kept of them is their memory.
        calls.states = [state.detach() for state in returned if state.requires_grad]

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Report layers all of whose calls, but the first, got a state without a graph."""
        calls = [
            layer
            for layer in self._calls.values()
            if layer.count >= MIN_CALLS and layer.cut == layer.count - 1
        ]
        for of_layer in calls:
            name = self._name(of_layer.layer)
            self.report(
                StateWithoutGraph(
                    self.step, name, type(of_layer.layer).__name__, of_layer.count, of_layer.line
                )
            )
        self._report_axis({shape for root in roots for shape in _predictions(root.grad_fn)})
        self._left -= bool(self._calls or self._shapes)
        self._calls.clear()
        self._shapes.clear()
        if self._is_on and not self._left:
            self.forget()

    def _report_axis(self, predictions: set[tuple[int, ...]]) -> None:
        """Report the first layer for which time is as long as the loss has samples, one row for each.

        A prediction for each position of several samples has an axis for both.
        """
        for layer, shape, line in list(self._shapes.values())[:1]:
            if (
                shape[0] != shape[1] > 1
                and predictions
                and all(len(rows) == 1 and rows[0] == shape[0] for rows in predictions)
            ):
                kind, name = type(layer).__name__, self._name(layer)
                self.report(SamplesAsTime(self.step, name, kind, list(shape), line))

    def _name(self, layer: nn.Module) -> str:
        weights = [named.parameter for named in named_parameters(layer)]
        return next((name.rpartition(".")[0] for w in weights if (name := self.name_of(w))), "")


def _predictions(root: Node | None) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of what the loss functions below a root get, without an axis of classes or outputs."""
    for kind, node in terms(root):
        shape = shape_of(first_input(node)) if kind in CLASS_LOSSES or kind in _OTHER_LOSSES else None
        if shape is not None:
            yield shape[:1] + shape[2:] if kind in CLASS_LOSSES or shape[1:] == (1,) else shape


def _is_without_graph(state: Tensor, last: Tensor) -> bool:
    """Return whether ``state`` has the memory, or the values, of a state that was returned, and no graph."""
    if state.requires_grad or state.numel() != last.numel() or state.device != last.device:
        return False
    if state.untyped_storage().data_ptr() == last.untyped_storage().data_ptr():
        return True
    is_on_host = state.device.type == "cpu"
    return is_on_host and state.shape == last.shape and torch.equal(state.detach(), last)
