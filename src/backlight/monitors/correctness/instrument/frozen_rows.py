"""Rows of a weight whose gradients a script sets to zero, and which move all the same."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.capture.training_threads import outside_modes
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules import trained_tensors as facts
from backlight.user_code import definition

MAX_PARAMETERS = 4
"""Parameters whose gradients are compared."""

STEPS = 3
"""Steps at which the gradients of a parameter are compared."""

COLUMNS = 4
"""Weights of each row that are compared."""

MOVED = 0.9
"""Share of the frozen rows that move."""


@dataclass
class _Masked:
    """A parameter whose gradient something changes after autograd has computed it.

    ``incoming`` are the rows in which autograd had values in this step, ``zeroed`` those of them that were
    zero at a step of the optimizer, ``used`` those that were not, ``before`` the first weights of each row.
    """

    parameter: weakref.ref[Tensor]
    line: str
    before: Tensor
    incoming: Tensor | None = None
    zeroed: Tensor | None = None
    used: Tensor | None = None
    steps: int = 0
    handle: Any = None


class FrozenRows(Check):
    """``trained_tensors``, ``frozen_rows``: a mask on gradients is no freeze where weights decay.

    A parameter is followed if it has a hook, or if a script writes to its gradient and not to all of them.
    """

    name = "frozen_rows"
    steps = "first"

    def _start(self) -> None:
        self._masked: dict[int, _Masked] = {}
        self._versions: dict[int, int] = {}
        self._written: set[int] = set()  # whose gradients the script writes to

    def forget(self) -> None:
        """Remove the hooks."""
        for masked in self._masked.values():
            _remove(masked)
        self._masked = {}

    # Events

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Observe what autograd computes for the parameters that are followed."""
        if not self.due:
            return
        for optimizer in self.run.scope.optimizers():
            for parameter in _masked_parameters(optimizer, self._written):
                if len(self._masked) < MAX_PARAMETERS and id(parameter) not in self._masked:
                    before = local(parameter).detach()[:, :COLUMNS].clone()
                    self._masked[id(parameter)] = _Masked(weakref.ref(parameter), _line(parameter), before)
        for masked in self._masked.values():
            tensor: Any = masked.parameter()
            if tensor is not None and masked.handle is None and masked.steps < STEPS:
                masked.handle = tensor.register_hook(functools.partial(_note, weakref.ref(masked)))
                _put_first(tensor._backward_hooks)

    def backward_end(self) -> None:
        """Note the versions of all gradients: what is written to some of them is more than clipping."""
        for masked in self._masked.values():
            _remove(masked)
        if self.due:
            tensors = [p for o in self.run.scope.optimizers() for p in parameters_of(o)]
            self._versions = {id(p): local(p.grad)._version for p in tensors if p.grad is not None}

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare the gradients with those that autograd computed, and the weights with those before."""
        if not self.due or has_closure or not self.run.scope.holds(optimizer):
            return
        self._note_written(optimizer)
        stepped_ids = {id(p) for p in parameters_of(optimizer)}
        for key in [key for key in self._masked if key in stepped_ids]:
            masked = self._masked[key]
            parameter, incoming, masked.incoming = masked.parameter(), masked.incoming, None
            if parameter is None or parameter.grad is None or parameter.grad.layout is not torch.strided:
                masked.steps = STEPS + 1
            elif masked.steps == STEPS:
                masked.steps += 1
                self._compare(masked, parameter, optimizer)
            elif incoming is not None and masked.steps < STEPS:
                with torch.no_grad():
                    used = local(parameter.grad).ne(0).any(1)
                    zeroed = incoming & ~used
                    masked.zeroed = zeroed if masked.zeroed is None else masked.zeroed | zeroed
                    masked.used = used if masked.used is None else masked.used | used
                masked.steps += 1

    # Comparison

    def _note_written(self, optimizer: torch.optim.Optimizer) -> None:
        changes = {
            id(p): local(p.grad)._version - self._versions[id(p)]
            for p in parameters_of(optimizer)
            if p.grad is not None and id(p) in self._versions
        }
        least = min(changes.values(), default=0)
        self._written |= {key for key, change in changes.items() if change != least}

    def _compare(self, masked: _Masked, parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
        zeroed, used = masked.zeroed, masked.used
        if zeroed is None or used is None:
            return
        with torch.no_grad():
            has_moved = (local(parameter)[:, :COLUMNS] != masked.before).any(1)
            counts = (zeroed & used).sum(), zeroed.sum(), (zeroed & has_moved).sum()
        decay = _decay(optimizer, parameter)
        step, name, rows, line = self.step, self.name_of(parameter), len(parameter), masked.line
        kind = type(optimizer).__name__

        def report(both: NDArray[Any], frozen: NDArray[Any], moved: NDArray[Any]) -> None:
            if not int(both) and 0 < int(frozen) < rows and int(moved) >= MOVED * int(frozen):
                self.report(facts.FrozenRowsMove(step, name, rows, int(frozen), decay, kind, line))

        self.when_known(report, *counts)


def _note(reference: weakref.ref[_Masked], gradient: Tensor) -> None:
    """Note the rows in which a gradient has values, before hooks of the script change it."""
    masked = reference()
    if masked is None or gradient.layout is not torch.strided or gradient.ndim < 2:
        return
    with outside_modes(), torch.no_grad():
        rows = local(gradient).ne(0).any(1)
        masked.incoming = rows if masked.incoming is None else masked.incoming | rows


def _put_first(hooks: dict[int, Any] | None) -> None:
    """Call the last hook before the others: native code iterates in the order of insertion."""
    if hooks is not None and len(hooks) > 1:
        *others, last = hooks.items()
        hooks.clear()
        hooks.update([last, *others])


def _remove(masked: _Masked) -> None:
    if masked.handle is not None:
        masked.handle.remove()
        masked.handle = None
        parameter = masked.parameter()
        if parameter is not None and not parameter._backward_hooks:
            parameter._backward_hooks = None  # as before: torch leaves an empty table


def _masked_parameters(optimizer: torch.optim.Optimizer, written: set[int]) -> Iterator[Tensor]:
    """Yield the matrices with a hook, or whose gradients a script writes to."""
    for parameter in parameters_of(optimizer):
        is_matrix = parameter.ndim == 2 and parameter.requires_grad and local(parameter) is parameter
        if is_matrix and (id(parameter) in written or _hooks(parameter)):
            yield parameter


def _hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks on a parameter, but for those of backlight."""
    tables = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    hooks = [hook for table in tables for hook in (table or {}).values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # of a partial
    modules = [str(getattr(function, "__module__", "")) for function in functions]
    return [hook for hook, module in zip(hooks, modules, strict=True) if not module.startswith("backlight.")]


def _line(parameter: Tensor) -> str:
    """Return where a hook on a parameter is defined; empty where there is none in the script."""
    lines = (definition(hook) for hook in _hooks(parameter) if isinstance(hook, FunctionType))
    return str(next(filter(None, lines), ""))


def _decay(optimizer: torch.optim.Optimizer, parameter: Tensor) -> float:
    decays = [
        g.get("weight_decay", 0.0) for g in optimizer.param_groups if any(p is parameter for p in g["params"])
    ]
    return float(decays[0]) if decays and isinstance(decays[0], (int, float)) else 0.0
