"""Tape of the operations of a forward pass, also where autograd does not record.

Autograd's graph holds what the loss can reach, but nothing of a value that was detached, computed under
``no_grad`` or rounded to integers. The tape holds every operation with its input and output tensors, and
marks those where a value with a gradient came out without one. Tensors are identified by a number, never
held.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from backlight.capture.batches import tensors_in
from backlight.capture.calls import (
    LEAVES_TORCH,
    NO_COMPUTATION,
    RETURNS_TO_TORCH,
    ModuleCalls,
    operation_name,
    written_in_place,
)
from backlight.diagnose.script_observer import OperationRecorder, Origin, next_number
from backlight.interrupts import is_interrupt
from backlight.user_code import SourceLine, definition, user_line

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches

MAX_OPERATIONS = 2_000_000
"""Operations of one step after which the tape stops, to bound its memory."""


@dataclass(slots=True)
class Operation:
    """One operation on the tape; tensors by number."""

    name: str
    line: SourceLine | None
    module: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cut: str = ""  # kind of cut where a differentiable value came out without a gradient
    inside: int = -1  # position of the custom function in whose `forward` it ran
    in_backward: bool = False
    changed: tuple[tuple[int, int], ...] = ()  # tensors written in place, with their version after it
    carries: bool = False
    shape: tuple[int, ...] = ()  # of the tensor written in place
    enabled: bool = True
    is_update: bool = False  # of an optimizer


@dataclass(frozen=True, slots=True)
class GradRead:
    """The ``.grad`` of a tensor was read at ``line``, which ``producer`` had computed."""

    shape: tuple[int, ...]
    line: SourceLine | None
    producer: Operation | None


class Tape(OperationRecorder, TorchFunctionMode):
    """Records the operations of the thread that enters it."""

    def __init__(self, calls: ModuleCalls, on_error: Callable[[Exception], None]) -> None:
        super().__init__(calls, on_error)
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._next = 0
        self._inside: list[int] = []
        self.operations: list[Operation] = []
        self.earlier: deque[list[Operation]] = deque(maxlen=2)  # of the last tapes
        self.frozen_at: dict[int, tuple[weakref.ref[torch.Tensor], SourceLine]] = {}
        self.grad_reads: dict[int, GradRead] = {}
        self.in_backward = False
        self.full = False

    def clear(self) -> None:
        """Start a new tape, and keep the last two."""
        self.earlier.append(self.operations)
        self.operations = []
        self._numbers = {key: entry for key, entry in self._numbers.items() if entry[0]() is not None}
        self.origins.clear()
        self._inside.clear()
        self.full = False

    # Recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and record the operation."""
        kwargs = kwargs or {}
        if self.paused or self.full:
            return func(*args, **kwargs)
        name = operation_name(func)
        if not name or name in NO_COMPUTATION:
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        carrying = [t.requires_grad for t in inputs]
        begin = next_number()
        result = func(*args, **kwargs)
        try:
            self._record(name, args, kwargs, inputs, carrying, result, begin)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._drop(error)
        return result

    def _record(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        carrying: list[bool],
        result: Any,
        begin: int,
    ) -> None:
        if name in {"requires_grad.set", "requires_grad_"}:
            self._record_freezing(name, args, kwargs)
            return
        if name == "grad.get":
            self._record_grad_read(inputs[0])
            return
        changed = written_in_place(name, inputs, kwargs)
        outputs = tensors_in(result)
        line, module = user_line(), self._module()
        self.origins.add(begin, next_number(), Origin(name, line, module))
        for tensor in changed:
            outputs = [*outputs, tensor]
            if tensor._is_view() and tensor._base is not None:
                outputs.append(tensor._base)
        operation = self._add(name, line, module)
        operation.inputs = tuple(map(self.number, inputs))
        operation.outputs = tuple(map(self.number, outputs))
        operation.carries = any(carrying)
        if operation.carries and not any(t.requires_grad for t in outputs):
            operation.cut = _kind_of_cut(name, outputs)
        operation.changed = tuple((self.number(t), t._version) for t in changed if not t.is_inference())
        operation.shape = tuple(changed[0].shape) if changed else ()
        self.full = len(self.operations) >= MAX_OPERATIONS

    def _add(self, name: str, line: SourceLine | None, module: int = 0) -> Operation:
        inside = self._inside[-1] if self._inside else -1
        operation = Operation(
            name, line, module, (), (), inside=inside, in_backward=self.in_backward,
            enabled=torch.is_grad_enabled(),
        )  # fmt: skip
        self.operations.append(operation)
        return operation

    def add_update(
        self, name: str, line: SourceLine | None, versions: list[tuple[torch.Tensor, int]]
    ) -> None:
        """Record that an optimizer has written tensors, which had these versions before."""
        for tensor, before in versions:
            if tensor._version > before and not self.full:
                operation = self._add(name, line)
                number = self.number(tensor)
                operation.changed = tuple((number, v) for v in range(before + 1, tensor._version + 1))
                operation.shape, operation.is_update = tuple(tensor.shape), True

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of ``tensor`` on the tape."""
        numbered = self._numbers.get(id(tensor))
        # An id may have been taken over by a new tensor after the old one was freed.
        if numbered is not None and numbered[0]() is tensor:
            return numbered[1]
        self._next += 1
        self._numbers[id(tensor)] = (weakref.ref(tensor), self._next)
        return self._next

    def _record_freezing(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        line = user_line()
        if wanted:
            self.frozen_at.pop(id(args[0]), None)
        elif line is not None:
            self.frozen_at[id(args[0])] = (weakref.ref(args[0]), line)

    def _record_grad_read(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and not tensor.is_leaf and not tensor.retains_grad:
            number = self.number(tensor)
            if number not in self.grad_reads:
                made = next((o for o in reversed(self.operations) if number in o.outputs), None)
                self.grad_reads[number] = GradRead(tuple(tensor.shape), user_line(), made)

    # Custom functions

    def enter_function(self, name: str, line: SourceLine | None) -> int:
        """Record that the ``forward`` of a custom function begins; return its position on the tape."""
        self._add(name, line)
        self._inside.append(len(self.operations) - 1)
        return self._inside[-1]

    def leave_function(
        self, at: int, inputs: list[torch.Tensor], carrying: list[bool], outputs: list[torch.Tensor]
    ) -> None:
        """Record its end, with its inputs and outputs."""
        if not self._inside or self._inside[-1] != at or at >= len(self.operations):
            return
        self._inside.pop()
        operation = self.operations[at]
        operation.inputs = tuple(self.number(t) for t in inputs)
        operation.outputs = tuple(self.number(t) for t in outputs)
        operation.carries = any(carrying)
        if operation.carries and not any(t.requires_grad for t in outputs):
            operation.cut = "no_grad" if not operation.enabled else "function"


def _kind_of_cut(name: str, outputs: list[torch.Tensor]) -> str:
    if name in LEAVES_TORCH:
        return "numpy" if name in RETURNS_TO_TORCH else ""
    if name in {"detach", "detach_"}:
        return "detach"
    if name in {"data.get", "data.set"}:
        return "data"
    if name in {"grad.set", "zero_", "grad.delete"} or not outputs:
        return ""
    if not torch.is_grad_enabled():
        return "no_grad"
    if not any(t.is_floating_point() or t.is_complex() for t in outputs):
        return "integer"
    return "not_differentiable"


# Custom functions


@dataclass(frozen=True, slots=True)
class NoneReturned:
    """A custom function whose backward returned None for an input that requires a gradient."""

    function: str
    sequence: int  # of the node in a walked graph
    edge: int  # index of the input
    applied: SourceLine | None
    defined: SourceLine | None


def record_custom_functions(patches: Patches, tape: Tape, on_none: Callable[[NoneReturned], None]) -> None:
    """Record every ``Function.apply`` on ``tape``; report each None of a backward to ``on_none``."""

    def wrap(original: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = original.__get__(None, cls)  # of a class method in Python or, from torch 2.15 on, in C
            if tape.paused or tape.full:
                return bound(*args, **kwargs)
            inputs = tensors_in(args)
            carrying = [t.requires_grad for t in inputs]
            line = user_line()
            begin = next_number()
            at = tape.enter_function(cls.__name__, line)
            outputs: list[torch.Tensor] = []
            try:
                result = bound(*args, **kwargs)
                outputs = tensors_in(result)
            finally:
                tape.leave_function(at, inputs, carrying, outputs)
            # The node takes its number before its forward runs.
            tape.origins.add(begin, begin + 1, Origin(cls.__name__, line))
            _watch_backward(cls, args, outputs, line, on_none)
            return result

        return classmethod(apply)

    patches.replace(torch.autograd.Function, "apply", wrap)


def _watch_backward(
    cls: Any,
    args: tuple[Any, ...],
    outputs: list[torch.Tensor],
    line: SourceLine | None,
    on_none: Callable[[NoneReturned], None],
) -> None:
    # Only the tensors that are arguments themselves are edges of the node.
    requiring = [t.requires_grad for t in args if isinstance(t, torch.Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    if not any(requiring) or not differentiable:
        return
    node = differentiable[0].grad_fn
    if node is None or not hasattr(node, "needs_input_grad"):
        return
    defined = definition(getattr(cls, "backward", None))
    sequence = node._sequence_nr()
    name = cls.__name__

    def after(grads: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        if all(g is None for g in outputs):
            return
        for edge, (grad, requires) in enumerate(zip(grads, requiring, strict=False)):
            if requires and grad is None:
                on_none(NoneReturned(name, sequence, edge, line, defined))

    node.register_hook(after)
