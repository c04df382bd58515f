"""The optimizers of this process: which are in use, which step is running, and updates made without one."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture import engines, modules

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable, Scope


class SeenOptimizers:
    """Weak references to the optimizers of this process, in the order in which they were met.

    One that a scan found may belong to a run that is over: it counts as soon as it is used. ``goes_on`` is
    whether the closure of the step in progress adds the last microbatch to gradients that are there.
    """

    goes_on = False

    def __init__(self) -> None:
        self._references: list[weakref.ref[torch.optim.Optimizer]] = []
        self._in_use: set[int] = set()
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()

    def use_engine(self, engine: engines.EngineOptimizer) -> None:
        """Remember the optimizer of an engine, and that the one inside it does not step on its own."""
        self._parts.add(engine.inner)
        self.use(engine)  # type: ignore[arg-type]  # it has what is used of one

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember ``optimizer``, which was just made or is being used."""
        self._meet(optimizer)
        self._in_use.add(id(optimizer))

    def set_aside(self, optimizer: torch.optim.Optimizer) -> None:
        """Count ``optimizer`` as not used: another thread trains with it, and writes its gradients meanwhile.

        torch guards ``.grad`` by no lock: to read it while a backward of another thread sets it may crash.
        """
        self._in_use.discard(id(optimizer))

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        for reference in self._references:
            if reference() is optimizer:
                return
        self._in_use.discard(id(optimizer))  # the id of one that is gone
        self._references.append(weakref.ref(optimizer))

    def scan(self) -> None:
        """Look for optimizers that were made before the hooks were there."""
        for optimizer in modules.live_objects(torch.optim.Optimizer):
            self._meet(optimizer)

    def use_holders(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count every optimizer that holds one of ``tensors`` as used."""
        wanted = {id(tensor) for tensor in tensors}
        for optimizer in self.existing():
            if any(id(p) in wanted or id(p.grad) in wanted for p in parameters_of(optimizer)):
                self._in_use.add(id(optimizer))

    def rest(self) -> None:
        """Count none as used any more: watching has ended."""
        self._in_use.clear()

    def alive(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that exist and are in use."""
        return [optimizer for optimizer in self.existing() if id(optimizer) in self._in_use]

    def is_any_alive(self) -> bool:
        """Return whether :meth:`alive` has any."""
        for reference in self._references:
            if id(reference()) in self._in_use and reference() is not None:
                return True
        return False

    def existing(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that exist, in use or not."""
        self._references = [r for r in self._references if r() is not None]
        existing = [reference() for reference in self._references]
        parts = self._parts
        return [o for o in existing if o is not None and o not in parts and getattr(o, "param_groups", None)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that ``optimizer`` holds, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""Of what torch puts around the step of every class, also where the compiler has wrapped that once more."""


class OpenSteps:
    """Steps that have ``begun`` and not ended; one that raised is over without an end."""

    def __init__(self) -> None:
        self.begun: list[weakref.ref[torch.optim.Optimizer]] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins."""
        self.begun.append(weakref.ref(optimizer))

    def end(self, optimizer: torch.optim.Optimizer) -> bool:
        """End a step; return False where none of ``optimizer`` had begun."""
        for reference in self.begun:
            if reference() is optimizer:
                self.begun.remove(reference)
                return True
        return False

    def drop_raised(self) -> bool:
        """Drop those that are not on the stack of this thread any more; return whether there were any."""
        before = len(self.begun)
        self.begun = [r for r in self.begun if (optimizer := r()) is not None and _is_running(optimizer)]
        return len(self.begun) < before


def _is_running(optimizer: torch.optim.Optimizer) -> bool:
    # The step of an engine is not of torch: its own hook says how it ended.
    return not hooked_steps(type(optimizer)) or _calls(optimizer, most=1) == 1


def _calls(optimizer: torch.optim.Optimizer, most: int) -> int:
    """Return how many calls of a step of ``optimizer`` are on the stack, up to ``most``."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and count < most:
        count += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count


def is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of ``optimizer`` runs within another: one that calls ``super().step()``.

    torch puts its hooks around the step of every class of which there is an instance.
    """
    return len(hooked_steps(type(optimizer))) > 1 and _calls(optimizer, most=2) > 1


def hooked_steps(kind: type[torch.optim.Optimizer]) -> list[Any]:
    """Return the ``step`` of each class of an optimizer around which torch has put its hooks."""
    steps = []
    for base in kind.__mro__:
        step = base.__dict__.get("step")
        if getattr(step, "hooked", False):
            steps.append(step)
    return steps


PROBES = 4
"""Parameters of each optimizer whose gradients are followed, evenly spaced: to look at all costs too much."""

State = tuple[tuple[int, int] | None, ...]
"""Gradient of each probe as identity and version; None where there is none."""


class ReachedOptimizers:
    """Compares the gradients of some parameters of each optimizer before and after a backward."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._table: ParameterTable | None = None
        self._probes: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._before: dict[int, State] = {}
        self._left: dict[int, State] = {}

    def begin(self) -> None:
        """Look at the gradients: a backward begins."""
        if self._table is not self._scope.table:
            self._table = self._scope.table
            self._probes = dict(self._choose())
        self._before = {number: _state(probes) for number, probes in self._probes.items()}

    def end(self) -> Mapping[int, bool]:
        """Return the numbers of the optimizers whose gradients the backward changed.

        True where they hold that of earlier ones as well, which nothing has cleared in between.
        """
        reached = {}
        for number, before in self._before.items():
            after = _state(self._probes[number])
            if any(new is not None and new != old for new, old in zip(after, before, strict=True)):
                left = self._left.get(number, ())
                reached[number] = any(old is not None and old in left for old in before)
                self._left[number] = after
        return reached

    def _choose(self) -> Iterator[tuple[int, list[weakref.ref[torch.Tensor]]]]:
        for optimizer in self._scope.optimizers():
            listed = parameters_of(optimizer)
            listed = [p for p in listed if p.requires_grad] or listed
            rows = {round(i * (len(listed) - 1) / (PROBES - 1)) for i in range(PROBES)} if listed else set()
            yield self._scope.number(optimizer), [weakref.ref(listed[row]) for row in sorted(rows)]


def _state(probes: list[weakref.ref[torch.Tensor]]) -> State:
    gradients = [None if (p := reference()) is None else p.grad for reference in probes]
    return tuple([None if g is None else (id(g), g._version) for g in gradients])


MAX_NODES = 1_000_000
"""Nodes of a graph that are visited for its leaves."""

TENSORS = 8
"""Parameters that are followed."""

VALUES = 16
"""Values of each that are compared, where that takes no wait for a device: `.data` leaves no trace."""


class UpdatesByHand:
    """Compares a sample of the parameters with what they were when the last backward ended."""

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[torch.Tensor], int, list[float]]] = []

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remember the parameters that have a gradient now."""
        with_gradient = [p for p in parameters if p.grad is not None]
        spread = with_gradient[:: -(-len(with_gradient) // TENSORS) or 1]
        self._noted = [(weakref.ref(p), p._version, _values(p)) for p in spread]

    def forget(self) -> None:
        """Begin anew."""
        self._noted = []

    def is_made(self) -> bool:
        """Return whether one has changed."""
        return any(
            (now := noted()) is not None and (now._version != version or _values(now) != values)
            for noted, version, values in self._noted
        )


def leaves_below(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a backward from ``roots`` gives gradients, those nearest to a root first."""
    pending = deque([root.grad_fn for root in roots if root.grad_fn is not None])
    seen, leaves = set(pending), []
    while pending and len(seen) < MAX_NODES:
        node = pending.popleft()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        below = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(below)
        pending.extend(dict.fromkeys(below))
    return leaves


def _values(parameter: torch.Tensor) -> list[float]:
    if type(parameter) not in {torch.Tensor, torch.nn.Parameter} or not parameter.is_cpu:
        return []
    flat: list[float] = parameter.detach().reshape(-1)[:VALUES].tolist()
    return flat
