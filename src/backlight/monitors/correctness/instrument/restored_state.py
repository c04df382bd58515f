"""Whether what a script loads from a checkpoint is what it then trains with."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.monitors.correctness.instrument.check import Check, TensorSet
from backlight.monitors.correctness.instrument.samples import (
    UNRELATED,
    Snapshot,
    cosine,
    sampled,
    thinned,
)
from backlight.monitors.correctness.model.facts import Names
from backlight.monitors.correctness.rules import restored_state as facts
from backlight.user_code import SourceLine, user_line

MAX_PARAMETERS = 12
"""Matrices of a loaded module that are followed, evenly over it."""

VALUES = 64
"""Values of each that are compared."""

MAX_STATES = 8
"""States of optimizers that are remembered."""

MAX_ENTRIES = 64
"""Entries of a loaded object that are searched."""

MAX_EMPTIED = 512
"""Tensors that ``to_empty`` leaves uninitialised which are followed."""


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


class _Emptied(NamedTuple):
    """A tensor of a module that ``to_empty`` has allocated, its version then, and its row in the snapshot."""

    name: str
    tensor: weakref.ref[Tensor]
    version: int
    row: int


@dataclass
class _Rates:
    """Learning rates of the groups of an optimizer: as it was made, and as a state has set them."""

    made: list[float | None]
    loaded: list[float | None] | None = None
    line: str = ""


def _rates(optimizer: torch.optim.Optimizer) -> list[float | None]:
    return [_number(group.get("lr")) for group in optimizer.param_groups]


def _number(value: Any) -> float | None:
    """Return a rate that is a plain number: to read a tensor may wait for a device."""
    return float(value) if isinstance(value, (int, float)) else None


@dataclass(frozen=True)
class _SavedPart:
    """The state of a schedule or a gradient scaler in a checkpoint: its keys, and how far it was."""

    keys: frozenset[str]
    value: float
    line: str


SCHEDULE = frozenset({"last_epoch", "_last_lr", "base_lrs"})
SCALER = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval"})
"""Keys that the state of a schedule, and that of a gradient scaler, have."""


class RestoredState(Check):
    """Compares a checkpoint that is loaded with what the training run begins with."""

    name = "restored_state"
    steps = "all"

    def _start(self) -> None:
        self._states: list[_SavedState] = []
        self._begun: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._loaded = TensorSet()  # parameters that a state was loaded into
        self._values: list[tuple[Snapshot, list[_Matrix]]] = []
        self._rates: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Rates] = weakref.WeakKeyDictionary()
        self._refused: list[tuple[weakref.ref[nn.Module], facts.NothingLoaded]] = []
        self._schedules: list[_SavedPart] = []
        self._scalers: list[_SavedPart] = []
        self._made_schedules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._resumed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._tied: set[tuple[tuple[str, ...], int]] = set()  # names of one tensor in a checkpoint
        self._untied: list[tuple[tuple[weakref.ref[Tensor], ...], facts.UntiedWhenLoaded]] = []
        self._emptied: list[tuple[weakref.ref[nn.Module], Snapshot, list[_Emptied], str]] = []

    # Events

    def loaded(self, value: Any) -> None:
        """Remember the states of optimizers and the tied parameters in a checkpoint."""
        self._tied |= {tie for part in _mappings(value) for tie in _ties(part)}
        for part in _mappings(value):
            line = str(user_line() or "")
            if part.keys() >= SCHEDULE and (last := _number(part["last_epoch"])) is not None:
                self._schedules.append(_SavedPart(frozenset(part), last, line))
            elif part.keys() >= SCALER and (scale := _number(part["scale"])) is not None:
                self._scalers.append(_SavedPart(frozenset(part), scale, line))
        for state in filter(_is_optimizer_state, _mappings(value)):
            shapes = _shapes(state)
            if any(shapes):
                settings = tuple(_settings(group) for group in state["param_groups"])
                self._states = [*self._states, _SavedState(settings, shapes, user_line())][-MAX_STATES:]

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the learning rates that the script has given."""
        self._rates[optimizer] = _Rates(_rates(optimizer))

    def schedule_made(self, schedule: Any, steps_per_epoch: int | None) -> None:
        """Remember a schedule that may get a state."""
        self._made_schedules.add(schedule)

    def scaler_begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Compare the scale that a scaler began with, and that of the checkpoint, at its first step."""
        scalers, self._scalers = self._scalers, []
        first = _number(getattr(scaler, "_init_scale", None))
        # A state that is loaded sets the first scale.
        if len(scalers) != 1 or optimizer not in self._resumed or first in {None, scalers[0].value}:
            return
        saved = scalers[0]
        self.report(
            facts.PartNotRestored(
                self.step, "GradScaler", "scale", saved.value, float(first or 0), saved.line
            )
        )

    def optimizer_loaded(self, optimizer: torch.optim.Optimizer, state: Any, result: Any) -> None:
        """The states of this size have been used."""
        self._resumed.add(optimizer)
        if (rates := self._rates.get(optimizer)) is not None:
            rates.loaded, rates.line = _rates(optimizer), str(user_line() or "")
        count = len(parameters_of(optimizer))
        self._states = [saved for saved in self._states if len(saved.shapes) != count]

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Remember which parameters have been loaded, and some of their values."""
        missing = set(getattr(result, "missing_keys", ()))
        unexpected = getattr(result, "unexpected_keys", ())
        if self.run.clock.done or HUB.own_passes:
            return
        if missing and len(unexpected) == len(state) > 0:
            first, line = str(next(iter(unexpected))), str(user_line() or "")
            fact = facts.NothingLoaded(0, kind_of(module), len(state), first, min(missing), line)
            self._refused.append((weakref.ref(module), fact))
            return
        loaded = [(name, p) for name, p in module.named_parameters() if name in state and name not in missing]
        for _, parameter in loaded:
            self._loaded.add(parameter)
        named = dict(module.named_parameters(remove_duplicate=False))
        for names, _ in self._tied & set(_ties(state)):
            tensors = {id(named[name]): named[name] for name in names if name in named}
            if len(tensors) == len(names):
                line = str(user_line() or "")
                tie = facts.UntiedWhenLoaded(0, kind_of(module), names, line)
                self._untied.append((tuple(map(weakref.ref, tensors.values())), tie))
        matrices = [(name, p) for name, p in loaded if p.ndim > 1 and local(p).numel() and not p.is_meta]
        if chosen := thinned(matrices, MAX_PARAMETERS):
            values = self.snapshot([sampled(local(p), VALUES) for _, p in chosen])
            self._values.append((values, [_Matrix(name, weakref.ref(p), p.numel()) for name, p in chosen]))

    def emptied(self, module: nn.Module) -> None:
        """Remember the tensors of a module whose values are those of the memory that they were given."""
        if self.run.clock.done or HUB.own_passes:
            return
        named = [*module.named_parameters(), *module.named_buffers()]
        plain = [(n, t) for n, t in named if local(t).numel() and not (t.is_meta or t.is_inference())]
        if chosen := plain[:MAX_EMPTIED]:
            values = self.snapshot([sampled(local(t), VALUES) for _, t in chosen])
            tensors = [_Emptied(n, weakref.ref(t), t._version, row) for row, (n, t) in enumerate(chosen)]
            self._emptied.append((weakref.ref(module), values, tensors, str(user_line() or "")))

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare what the first step of an optimizer finds with what was loaded."""
        if optimizer in self._begun or not self.run.scope.holds(optimizer):
            return
        self._begun.add(optimizer)
        parameters = parameters_of(optimizer)
        self._report_state(optimizer, parameters)
        self._report_rate(optimizer)
        self._report_schedule(optimizer)
        if not self.run.clock.done:
            self._report_refused({id(p) for p in parameters})
            self._report_values({id(p) for p in parameters})
            self._report_untied({id(p) for p in parameters})
            self._report_emptied({id(p) for p in parameters})

    # Comparisons

    def _report_state(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        if optimizer.state or not all(parameter in self._loaded for parameter in parameters):
            return
        for saved in self._states:
            if saved.fits(optimizer):
                kind, line = type(optimizer).__name__, str(saved.line or "")
                self.report(facts.OptimizerState(self.step, kind, len(parameters), line))
                self._states.remove(saved)
                return

    def _report_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Report rates of a checkpoint that replaced those of the script, and that no schedule explains."""
        rates = self._rates.pop(optimizer, None)
        if rates is None or rates.loaded is None or _rates(optimizer) != rates.loaded:
            return
        for built, loaded, group in zip(rates.made, rates.loaded, optimizer.param_groups, strict=False):
            # A schedule keeps where it began: that is the rate which a script of the same settings gives.
            first = _number(group.get("initial_lr"))
            if built is not None and loaded is not None and built != (loaded if first is None else first):
                kind = type(optimizer).__name__
                self.report(facts.RateReplaced(self.step, kind, built, loaded, rates.line))
                return

    def _report_schedule(self, optimizer: torch.optim.Optimizer) -> None:
        """Report a schedule that begins anew where its optimizer goes on, and its state was saved."""
        schedules = [schedule for schedule in self._made_schedules if schedule.optimizer is optimizer]
        if len(schedules) != 1 or optimizer not in self._resumed:
            return
        schedule = schedules[0]
        saved = [part for part in self._schedules if part.keys == schedule.state_dict().keys()]
        # One that a script steps, or creates with its last step, has caught up.
        if len(saved) == 1 and saved[0].value > 0 and schedule.last_epoch == 0:
            name = type(schedule).__name__
            self.report(
                facts.PartNotRestored(self.step, name, "last_epoch", saved[0].value, 0.0, saved[0].line)
            )

    def _report_refused(self, trained: set[int]) -> None:
        roots = self.run.scope.roots(trained) if self._refused else []
        for reference, fact in self._refused:
            module = reference()
            weights = [] if module is None else list(module.parameters())
            is_part = any(module is part for root in roots for part in root.modules())
            if weights and is_part and not any(p in self._loaded for p in weights):
                self.report(replace(fact, step=self.step))
        self._refused = []

    def _report_untied(self, trained_ids: set[int]) -> None:
        for references, fact in self._untied:
            # Where the module ties its parameters after loading, one of them is gone.
            if all((p := reference()) is not None and id(p) in trained_ids for reference in references):
                self.report(replace(fact, step=self.step))
        self._untied = []

    def _report_emptied(self, trained_ids: set[int]) -> None:
        """Report what nothing has written since ``to_empty``, and the trained module still holds."""
        for reference, before, tensors, line in self._emptied:
            module = reference()
            if module is None or not any(id(p) in trained_ids for p in module.parameters()):
                continue
            present = dict([*module.named_parameters(), *module.named_buffers()])
            left = [
                (emptied, tensor)
                for emptied in tensors
                if (tensor := emptied.tensor()) is not None
                and present.get(emptied.name) is tensor
                and tensor._version == emptied.version
            ]
            if left:
                # A write through `.data` has no version: it has other values.
                now = self.snapshot([sampled(local(tensor), VALUES) for _, tensor in left])
                names, step = [emptied for emptied, _ in left], self.step
                fact = facts.LeftEmpty(step, kind_of(module), Names.of([]), line)
                self.when_known(functools.partial(self._compare_emptied, fact, before, names, now))
        self._emptied = []

    def _compare_emptied(
        self, fact: facts.LeftEmpty, before: Snapshot, emptied: Sequence[_Emptied], now: Snapshot
    ) -> None:
        pairs = zip(emptied, now.arrays, strict=True)
        equal = [e.name for e, values in pairs if before.arrays[e.row].tobytes() == values.tobytes()]
        if equal:
            self.report(replace(fact, names=Names.of(equal)))

    def _report_values(self, trained: set[int]) -> None:
        now: dict[int, tuple[str, Tensor, Snapshot, int]] = {}
        for loaded, matrices in self._values:  # of several states, the last one counts
            for row, matrix in enumerate(matrices):
                parameter = matrix.parameter()
                if parameter is not None and id(parameter) in trained and parameter.numel() == matrix.size:
                    now[id(parameter)] = matrix.name, local(parameter), loaded, row
        self._values = []
        if len(now) < 2:
            return
        step = self.step
        values = self.snapshot([sampled(part, VALUES) for _, part, *_ in now.values()])

        def report() -> None:
            names = [name for name, *_ in now.values()]
            before = [loaded.arrays[row] for *_, loaded, row in now.values()]
            largest = max(map(cosine, before, values.arrays))
            if largest < UNRELATED:  # part of a model is often initialised again
                self.report(facts.Overwritten(step, Names.of(names), largest))

        self.when_known(report)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain settings of a group, the learning rate as it was before any schedule."""
    settings = {k: v for k, v in group.items() if isinstance(v, (bool, int, float, str, tuple))}
    if "initial_lr" in settings:
        settings["lr"] = settings.pop("initial_lr")
    return settings


def _shapes(state: Mapping[str, Any]) -> tuple[frozenset[tuple[int, ...]], ...]:
    """Return, per parameter of a saved optimizer, the shapes of the tensors of its state."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    kept = [state["state"].get(key) or {} for key in keys]
    return tuple(
        frozenset(tuple(t.shape) for t in e.values() if isinstance(t, Tensor) and t.ndim) for e in kept
    )


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings in what was loaded, the outer ones first."""
    pending = [value]
    for _ in range(MAX_ENTRIES):
        if not pending:
            return
        part = pending.pop(0)
        parts: Iterable[Any] = ()
        if isinstance(part, Mapping):
            yield part
            parts = () if _is_optimizer_state(part) else part.values()
        elif isinstance(part, (list, tuple)):
            parts = part
        pending += [part for part in parts if isinstance(part, (Mapping, list, tuple))]


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
