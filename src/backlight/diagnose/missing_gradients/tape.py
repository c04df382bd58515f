"""How values flow through a forward pass, also where autograd does not follow: a tape of operations.

Autograd's own graph says what the loss can reach; it says nothing of a value that was detached,
computed under ``no_grad`` or rounded to integers. The tape holds every operation with the tensors
that went in and came out, and marks those where a value that carried a gradient came out without.
Tensors are known by a number, never held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from backlight.capture.operations import NUMPY, QUIET, VALUES, operation_name, tensors_in, written
from backlight.diagnose.fork_guard import pause_in_children
from backlight.diagnose.node_origin import Origin, Origins, next_number
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.module_calls import ModuleCalls

LIMIT = 2_000_000
"""Operations of one step after which the tape stops, to keep the memory of the training its own."""


@dataclass(slots=True)
class Operation:
    """One operation on the tape; tensors by number.

    ``cut`` is the kind of cut where a differentiable value came out without a gradient, else empty.
    ``inside`` is the position of the custom function in whose ``forward`` it ran, -1 outside.
    ``changed`` are tensors written in place, with their version after it.
    """

    name: str
    line: SourceLine | None
    module: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cut: str = ""
    inside: int = -1
    in_backward: bool = False
    changed: tuple[tuple[int, int], ...] = ()
    carries: bool = False
    shape: tuple[int, ...] = ()
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class GradRead:
    """The ``.grad`` of a computed tensor was read at ``line``; ``maker`` had computed it."""

    shape: tuple[int, ...]
    line: SourceLine | None
    producer: Operation | None


class Tape(TorchFunctionMode):
    """Records the operations of the thread that enters it.

    Parameters
    ----------
    calls:
        Tells which module runs.
    on_error:
        Called once if recording fails; the training goes on without it.
    """

    def __init__(self, calls: ModuleCalls, on_error: Callable[[Exception], None]) -> None:
        super().__init__()
        self._calls = calls
        self._on_error = on_error
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._next = 0
        self._inside: list[int] = []
        self.operations: list[Operation] = []
        self.origins = Origins()
        self.frozen_at: dict[int, tuple[weakref.ref[torch.Tensor], SourceLine]] = {}
        self.grad_reads: dict[int, GradRead] = {}
        self.paused = False
        self.in_backward = False
        self.full = False
        pause_in_children(self)

    def clear(self) -> None:
        """Begin a new tape."""
        self.operations.clear()
        self._numbers.clear()
        self.origins.clear()
        self._inside.clear()
        self.full = False

    # Recording

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` and write down what it did."""
        kwargs = kwargs or {}
        if self.paused or self.full:
            return func(*args, **kwargs)
        name = operation_name(func)
        if not name or name in QUIET:
            return func(*args, **kwargs)
        inputs = tensors_in(args)
        if kwargs:
            tensors_in(kwargs, inputs)
        carrying = [t.requires_grad for t in inputs]
        begin = next_number()
        result = func(*args, **kwargs)
        try:
            self._record(name, args, kwargs, inputs, carrying, result, begin)
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self.paused = True
            self._on_error(error)
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
            self._note_freezing(name, args, kwargs)
            return
        if name == "grad.get":
            self._note_grad(inputs[0])
            return
        changed = written(name, inputs, kwargs)
        outputs = tensors_in(result)
        line = user_line()
        module = self._calls.current()
        self.origins.add(begin, next_number(), Origin(name, line, _key(module)))
        self.add(name, line, inputs, carrying, outputs, changed)

    def add(
        self,
        name: str,
        line: SourceLine | None,
        inputs: list[torch.Tensor],
        carrying: list[bool],
        outputs: list[torch.Tensor],
        changed: list[torch.Tensor],
    ) -> int:
        """Put an operation on the tape and return its position."""
        for tensor in changed:
            outputs = [*outputs, tensor]
            if tensor._is_view() and tensor._base is not None:
                outputs.append(tensor._base)
        carried = any(carrying)
        cut = ""
        if carried and not any(t.requires_grad for t in outputs):
            cut = _kind_of_cut(name, outputs)
        module = self._calls.current()
        self.operations.append(
            Operation(
                name=name,
                line=line,
                module=0 if module is None else id(module),
                inputs=tuple(self.number(t) for t in inputs),
                outputs=tuple(self.number(t) for t in outputs),
                cut=cut,
                inside=self._inside[-1] if self._inside else -1,
                in_backward=self.in_backward,
                changed=tuple((self.number(t), t._version) for t in changed if not t.is_inference()),
                carries=carried,
                shape=tuple(changed[0].shape) if changed else (),
                enabled=torch.is_grad_enabled(),
            )
        )
        if len(self.operations) >= LIMIT:
            self.full = True
        return len(self.operations) - 1

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number under which ``tensor`` is on the tape."""
        known = self._numbers.get(id(tensor))
        # An id may have been taken over by a new tensor after the old one was freed.
        if known is not None and known[0]() is tensor:
            return known[1]
        self._next += 1
        self._numbers[id(tensor)] = (weakref.ref(tensor), self._next)
        return self._next

    def _note_freezing(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        line = user_line()
        if wanted:
            self.frozen_at.pop(id(args[0]), None)
        elif line is not None:
            self.frozen_at[id(args[0])] = (weakref.ref(args[0]), line)

    def _note_grad(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and not tensor.is_leaf and not tensor.retains_grad:
            number = self.number(tensor)
            if number not in self.grad_reads:
                made = next((o for o in reversed(self.operations) if number in o.outputs), None)
                self.grad_reads[number] = GradRead(tuple(tensor.shape), user_line(), made)

    # Custom functions

    def enter_function(self, name: str, line: SourceLine | None) -> int:
        """Note that the ``forward`` of a custom function begins; return its position on the tape."""
        self.operations.append(
            Operation(name, line, 0, (), (), inside=self._inside[-1] if self._inside else -1,
                      in_backward=self.in_backward, enabled=torch.is_grad_enabled())
        )  # fmt: skip
        self._inside.append(len(self.operations) - 1)
        return self._inside[-1]

    def leave_function(
        self, at: int, inputs: list[torch.Tensor], carrying: list[bool], outputs: list[torch.Tensor]
    ) -> None:
        """Note that it is over, with what went in and came out."""
        if not self._inside or self._inside[-1] != at or at >= len(self.operations):
            return
        self._inside.pop()
        operation = self.operations[at]
        operation.inputs = tuple(self.number(t) for t in inputs)
        operation.outputs = tuple(self.number(t) for t in outputs)
        operation.carries = any(carrying)
        if operation.carries and not any(t.requires_grad for t in outputs):
            operation.cut = "no_grad" if not operation.enabled else "function"


def _key(module: nn.Module | None) -> str:
    return "" if module is None else str(id(module))


def _kind_of_cut(name: str, outputs: list[torch.Tensor]) -> str:
    if name in VALUES:
        return "numpy" if name in NUMPY else ""
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
