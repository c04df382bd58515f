"""Record the memory of training steps: every storage that an operation makes, from birth to end.

A dispatch mode sees each operation below autograd, forward and backward, on real tensors and on fake
ones. What a kernel allocates and frees inside itself (a vendor's workspace) is not seen.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backlight.capture.modules import walk
from backlight.records import Phase
from backlight.steptime.memory.ledger import Kind, Ledger, Storage


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """A dispatch mode that fills a ledger; enter it for the steps to record.

    Parameters
    ----------
    models:
        Models whose modules memory is attributed to.

    Attributes
    ----------
    ledger:
        What has come and gone so far.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self._models = list(models)
        self._known: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._phase: str = Phase.OTHER
        self._entered: list[tuple[str, int]] = []
        self._numbers: list[int] = []
        self._ranges: list[tuple[int, int, str]] = []
        self._handles: list[Any] = []

    # Life

    def __enter__(self) -> Recorder:
        """Enter what the models already hold, and begin to record."""
        for model in self._models:
            self._hold_model(model)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop recording; storages that end later are not entered."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._references.clear()

    def _hold_model(self, model: nn.Module) -> None:
        for name, module in walk(model):
            for parameter in (vars(module).get("_parameters") or {}).values():
                if parameter is not None:
                    self._hold(parameter, Kind.PARAMETERS, name)
                    if parameter.grad is not None:
                        self._hold(parameter.grad, Kind.GRADIENTS, name)
            for buffer in (vars(module).get("_buffers") or {}).values():
                if buffer is not None:
                    self._hold(buffer, Kind.BUFFERS, name)
            self._handles.append(module.register_forward_pre_hook(_Entered(self, name)))
            self._handles.append(module.register_forward_hook(_Returned(self), always_call=True))

    # What the loop tells

    def phase(self, phase: Phase) -> None:
        """A phase of the step begins; what is live from a forward when backward begins is activations."""
        if phase is Phase.BACKWARD:
            for index in self._known.values():
                storage = self.ledger.storages[index]
                if storage.kind is Kind.TEMPORARIES and storage.phase in {Phase.FORWARD, Phase.LOSS}:
                    storage.kind = Kind.ACTIVATIONS
        elif self._phase == Phase.BACKWARD:
            self._name_gradients()
        self._phase = phase
        self.ledger.phases.append((len(self.ledger.events), phase))

    def inputs(self, batch: Any) -> None:
        """Enter the tensors of a batch."""
        for tensor in tree_leaves(batch):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor, Kind.INPUTS, "")

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the state of an optimizer, each tensor under the module of its parameter."""
        owners = {
            id(p): name
            for model in self._models
            for name, m in walk(model)
            for p in m.parameters(recurse=False)
        }
        for parameter, state in optimizer.state.items():
            for tensor in tree_leaves(dict(state) if isinstance(state, Mapping) else state):
                if isinstance(tensor, torch.Tensor):
                    self._hold(tensor, Kind.OPTIMIZER_STATE, owners.get(id(parameter), ""))

    def _name_gradients(self) -> None:
        for model in self._models:
            for name, module in walk(model):
                for parameter in module.parameters(recurse=False):
                    if parameter.grad is not None:
                        self._hold(parameter.grad, Kind.GRADIENTS, name)

    # What happens

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and enter each storage among its results that is not known."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor, str(func))
        return result

    def enter_module(self, name: str) -> None:
        """A module's forward begins."""
        self._entered.append((name, _sequence()))

    def leave_module(self) -> None:
        """The innermost module's forward is over: the nodes made since it began are its."""
        if self._entered:
            name, begin = self._entered.pop()
            self._note_range(begin, _sequence(), name)

    def _note_range(self, begin: int, end: int, name: str) -> None:
        # Modules close inside out: what an inner one has taken stays its own.
        taken = bisect.bisect_left(self._numbers, begin)
        covered = begin
        pieces = []
        for start, stop, _ in self._ranges[taken:]:
            if covered < start:
                pieces.append((covered, start, name))
            covered = stop
        if covered < end:
            pieces.append((covered, end, name))
        for piece in pieces:
            place = bisect.bisect_left(self._numbers, piece[0])
            self._numbers.insert(place, piece[0])
            self._ranges.insert(place, piece)

    def _module(self) -> str:
        if self._entered:
            return self._entered[-1][0]
        if self._phase != Phase.BACKWARD:
            return ""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        place = bisect.bisect_right(self._numbers, number) - 1
        if place < 0 or number >= self._ranges[place][1]:
            return ""
        return self._ranges[place][2]

    def _meet(self, tensor: torch.Tensor, operation: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known or not storage.nbytes():
            return
        kind = Kind.ACTIVATIONS if self._entered and self._phase == Phase.BACKWARD else Kind.TEMPORARIES
        self._enter(tensor, storage, kind, self._module(), operation)

    def _hold(self, tensor: torch.Tensor, kind: Kind, module: str) -> None:
        storage = tensor.untyped_storage()
        index = self._known.get(storage._cdata)
        if index is None:
            if storage.nbytes():
                self._enter(tensor, storage, kind, module, "")
            return
        known = self.ledger.storages[index]
        # The first claim stays: a gradient that is a view of a bucket is the bucket's.
        if known.kind in {Kind.TEMPORARIES, Kind.ACTIVATIONS}:
            known.kind, known.module = kind, module

    def _enter(self, tensor: torch.Tensor, storage: Any, kind: Kind, module: str, operation: str) -> None:
        key = storage._cdata
        index = self.ledger.came(
            Storage(
                storage.nbytes(),
                kind,
                module,
                self._phase,
                operation,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
            )
        )
        self._known[key] = index

        def gone(_reference: Any) -> None:
            if self._references.pop(key, None) is not None:
                del self._known[key]
                self.ledger.went(index)

        self._references[key] = weakref.ref(storage, gone)


class _Entered:
    """Hook before a module's forward."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        self._recorder.enter_module(self._name)


class _Returned:
    """Hook after a module's forward."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._recorder.leave_module()


def _sequence() -> int:
    """Return the number that the next node of autograd will have in this thread."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # not in the stubs
    return number
