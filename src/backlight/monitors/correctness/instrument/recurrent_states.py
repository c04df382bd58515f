"""Whether the state that a recurrent layer gets is its last output, without the graph of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import tensors_in
from backlight.capture.hooks import Patches, is_transforming
from backlight.capture.modules import named_parameters
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules.graph_shapes import StateWithoutGraph
from backlight.user_code import user_line

LAYERS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell, nn.RNN, nn.GRU, nn.LSTM)

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


class RecurrentStates(Check):
    """``loss_input``: every call of a recurrent layer in a loss, but the first, begins a graph of its own."""

    name = "recurrent_states"
    steps = "first"

    def _start(self) -> None:
        self._patches = Patches()
        self._calls: dict[int, _Calls] = {}
        self._left, self._is_on = LOOKS, False

    def forget(self) -> None:
        """Observe no longer."""
        self._patches.undo()
        self._calls.clear()
        self._is_on = False

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Observe the recurrent layers of this forward, unless something is compiled in this process."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        is_compiled = dynamo is not None and dynamo.counters["frames"]
        if self._left and not self._is_on and torch.is_grad_enabled() and not is_compiled:
            self._is_on = True
            for layer in LAYERS:
                self._patches.replace(layer, "forward", self._wrapped)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def forward(layer: nn.Module, input: Any, hx: Any = None) -> Any:
            result = original(layer, input, hx)
            is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
            is_plain = not (is_traced or is_transforming() or is_capturing_graph())
            if self._is_on and is_plain and torch.is_grad_enabled():
                self._note(layer, tensors_in(hx), result)
            return result

        return forward

    def _note(self, layer: nn.Module, states: list[Tensor], result: Any) -> None:
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
        self._left -= bool(self._calls)
        self._calls.clear()
        if self._is_on and not self._left:
            self.forget()

    def _name(self, layer: nn.Module) -> str:
        weights = [named.parameter for named in named_parameters(layer)]
        return next((name.rpartition(".")[0] for w in weights if (name := self.name_of(w))), "")


def _is_without_graph(state: Tensor, last: Tensor) -> bool:
    """Return whether ``state`` has the memory, or the values, of a state that was returned, and no graph."""
    if state.requires_grad or state.numel() != last.numel() or state.device != last.device:
        return False
    if state.untyped_storage().data_ptr() == last.untyped_storage().data_ptr():
        return True
    is_on_host = state.device.type == "cpu"
    return is_on_host and state.shape == last.shape and torch.equal(state.detach(), last)
