"""Whether what a script loads from a checkpoint is what it then trains with."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of
from backlight.capture.parameters import local
from backlight.capture.seen_optimizers import parameters_of
from backlight.monitors.correctness.instrument.check import NAMED, Check
from backlight.monitors.correctness.instrument.samples import Snapshot, sampled, thinned
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

MAX_PARAMETERS = 12
"""Matrices of a loaded module that are followed, evenly over it."""

VALUES = 64
"""Values of each that are compared."""

MAX_STATES = 8
"""States of optimizers that are remembered."""

MAX_ENTRIES = 64
"""Entries of a loaded object that are searched."""

UNRELATED = 0.5
"""Cosine of loaded and present values, below which they are unrelated: 4 deviations for random ones."""


@dataclass(frozen=True)
class _SavedState:
    """The state of an optimizer in a checkpoint, without its tensors."""

    settings: tuple[dict[str, Any], ...]
    shapes: tuple[frozenset[tuple[int, ...]], ...]
    line: SourceLine | None

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer has these settings, and parameters of these shapes."""
        groups, parameters = optimizer.param_groups, parameters_of(optimizer)
        if len(groups) != len(self.settings) or len(parameters) != len(self.shapes):
            return False
        return all(
            saved.get(key, value) == value
            for saved, group in zip(self.settings, groups, strict=True)
            for key, value in _settings(group).items()
        ) and all(not s or tuple(p.shape) in s for s, p in zip(self.shapes, parameters, strict=True))


class _Matrix(NamedTuple):
    """A loaded matrix, of ``size`` elements."""

    name: str
    parameter: weakref.ref[Tensor]
    size: int


class RestoredState(Check):
    """``not_restored``: parts of a checkpoint that the training run does not begin with.

    ``nothing_loaded``: no key of a state belongs to the module that loads it. ``overwritten``: weights are
    unrelated to those that were loaded, at the first step. ``optimizer_state``: an optimizer without a state
    begins to train loaded weights, and the state in the same checkpoint has its settings and shapes.
    ``untied``: two parameters are one tensor in the checkpoint, and two in the module that loads it.
    """

    is_windowed = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._states: list[_SavedState] = []
        self._begun: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._loaded: dict[int, weakref.ref[Tensor]] = {}  # parameters that a state was loaded into
        self._values: list[tuple[Snapshot, list[_Matrix]]] = []
        self._refused: list[tuple[weakref.ref[nn.Module], dict[str, Any]]] = []
        self._tied: set[tuple[tuple[str, ...], int]] = set()  # names of one tensor in a checkpoint
        self._untied: list[tuple[tuple[weakref.ref[Tensor], ...], dict[str, Any]]] = []

    # Events

    def loaded(self, value: Any) -> None:
        """Remember the states of optimizers and the tied parameters in a checkpoint."""
        self._tied |= {tie for part in _mappings(value) for tie in _ties(part)}
        for state in _optimizer_states(value):
            shapes = _shapes(state)
            if any(shapes):
                settings = tuple(_settings(group) for group in state["param_groups"])
                self._states = [*self._states, _SavedState(settings, shapes, user_line())][-MAX_STATES:]

    def optimizer_loaded(self, optimizer: torch.optim.Optimizer, state: Any, result: Any) -> None:
        """The states of this size have been used."""
        count = len(parameters_of(optimizer))
        self._states = [one for one in self._states if len(one.shapes) != count]

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Remember which parameters have been loaded, and some of their values."""
        missing = set(getattr(result, "missing_keys", ()))
        unexpected = getattr(result, "unexpected_keys", ())
        if self.run.clock.done or HUB.own_passes:
            return
        if missing and len(unexpected) == len(state) > 0:
            facts = {
                "model": kind_of(module),
                "count": len(state),
                "given": next(iter(unexpected)),
                "expected": min(missing),
                "line": str(user_line() or ""),
            }
            self._refused.append((weakref.ref(module), facts))
            return
        own = [(name, p) for name, p in module.named_parameters() if name in state and name not in missing]
        self._loaded.update({id(p): weakref.ref(p) for _, p in own})
        named = dict(module.named_parameters(remove_duplicate=False))
        for names, _ in self._tied & set(_ties(state)):
            tensors = {id(named[name]): named[name] for name in names if name in named}
            if len(tensors) == len(names):
                facts = {"model": kind_of(module), "parameters": list(names), "line": str(user_line() or "")}
                self._untied.append((tuple(map(weakref.ref, tensors.values())), facts))
        matrices = [(name, p) for name, p in own if p.ndim > 1 and local(p).numel() and not p.is_meta]
        if chosen := thinned(matrices, MAX_PARAMETERS):
            values = self.snapshot([sampled(local(p), VALUES) for _, p in chosen])
            self._values.append((values, [_Matrix(name, weakref.ref(p), p.numel()) for name, p in chosen]))

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare what the first step of an optimizer finds with what was loaded."""
        if optimizer in self._begun or not self.run.scope.holds(optimizer):
            return
        self._begun.add(optimizer)
        own = parameters_of(optimizer)
        self._report_state(optimizer, own)
        if not self.run.clock.done:
            self._report_refused({id(p) for p in own})
            self._report_values({id(p) for p in own})
            self._report_untied({id(p) for p in own})

    # Comparisons

    def _report_state(self, optimizer: torch.optim.Optimizer, own: Sequence[Tensor]) -> None:
        is_loaded = [(found := self._loaded.get(id(p))) is not None and found() is p for p in own]
        if optimizer.state or not all(is_loaded):
            return
        for saved in self._states:
            if saved.fits(optimizer):
                facts = {
                    "optimizer": type(optimizer).__name__,
                    "count": len(own),
                    "line": str(saved.line or ""),
                }
                self.report("not_restored", self.run.clock.index, kind="optimizer_state", **facts)
                self._states.remove(saved)
                return

    def _report_refused(self, held: set[int]) -> None:
        for reference, facts in self._refused:
            module = reference()
            own = {id(p) for p in module.parameters()} if module is not None else set()
            if own and held <= own and not own & self._loaded.keys():
                self.report("not_restored", self.run.clock.index, kind="nothing_loaded", **facts)
        self._refused = []

    def _report_untied(self, held: set[int]) -> None:
        for references, facts in self._untied:
            # Where the module ties its parameters after loading, one of them is gone.
            if all((p := reference()) is not None and id(p) in held for reference in references):
                self.report("not_restored", self.run.clock.index, kind="untied", **facts)
        self._untied = []

    def _report_values(self, held: set[int]) -> None:
        now: dict[int, tuple[str, Tensor, Snapshot, int]] = {}
        for loaded, matrices in self._values:  # of several states, the last one counts
            for row, matrix in enumerate(matrices):
                parameter = matrix.parameter()
                if parameter is not None and id(parameter) in held and parameter.numel() == matrix.size:
                    now[id(parameter)] = matrix.name, local(parameter), loaded, row
        self._values = []
        if len(now) < 2:
            return
        step = self.run.clock.index
        values = self.snapshot([sampled(part, VALUES) for _, part, *_ in now.values()])

        def report() -> None:
            names = [name for name, *_ in now.values()]
            before = [loaded.arrays[row] for *_, loaded, row in now.values()]
            cosine = max(map(_cosine, before, values.arrays))
            if cosine < UNRELATED:  # part of a model is often initialised again
                facts = {"parameters": names[:NAMED], "count": len(names), "cosine": cosine}
                self.report("not_restored", step, kind="overwritten", **facts)

        self.when_known(report)


def _cosine(first: NDArray[np.generic], second: NDArray[np.generic]) -> float:
    a, b = first.astype(np.float64), second.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-8))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain settings of a group, the learning rate as it was before any schedule."""
    found = {k: v for k, v in group.items() if isinstance(v, (bool, int, float, str, tuple))}
    if "initial_lr" in found:
        found["lr"] = found.pop("initial_lr")
    return found


def _shapes(state: Mapping[str, Any]) -> tuple[frozenset[tuple[int, ...]], ...]:
    """Return, per parameter of a saved optimizer, the shapes of the tensors of its state."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    kept = [state["state"].get(key) or {} for key in keys]
    return tuple(
        frozenset(tuple(t.shape) for t in one.values() if isinstance(t, Tensor) and t.ndim) for one in kept
    )


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings in what was loaded, the outer ones first."""
    pending = [value]
    for _ in range(MAX_ENTRIES):
        if not pending:
            return
        one = pending.pop(0)
        held: Iterable[Any] = ()
        if isinstance(one, Mapping):
            yield one
            held = () if _is_optimizer_state(one) else one.values()
        elif isinstance(one, (list, tuple)):
            held = one
        pending += [part for part in held if isinstance(part, (Mapping, list, tuple))]


def _optimizer_states(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the states of optimizers in what was loaded."""
    return filter(_is_optimizer_state, _mappings(value))


def _is_optimizer_state(value: Mapping[str, Any]) -> bool:
    groups = value.get("param_groups")
    return (
        "state" in value
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    )


def _ties(state: Mapping[str, Any]) -> list[tuple[tuple[str, ...], int]]:
    """Return the names that share a matrix, with its address."""
    names: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.ndim > 1 and value.layout is torch.strided and value.numel():
            names.setdefault((value.data_ptr(), tuple(value.shape)), []).append(str(name))
    return [
        (tuple(sorted(tied)), address) for (address, _), tied in names.items() if len(tied) > 1 and address
    ]
