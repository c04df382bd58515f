"""The tensors that backward reached, compared with those that optimizers hold and modules use."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backlight.capture.hub import HUB
from backlight.capture.modules import NamedParameter, holding, kind_of, named_parameters, table_of, walk
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.interrupts import is_interrupt
from backlight.monitors.correctness.instrument.check import FIRST_STEPS, Check, TensorSet
from backlight.monitors.correctness.instrument.samples import Snapshot, first_values
from backlight.monitors.correctness.model.facts import Names
from backlight.monitors.correctness.rules import trained_tensors as facts
from backlight.user_code import SourceLine, user_line

FIRST_LOOKS = 4
"""Steps at the start at which all modules are looked at, which is then done at later observations."""

SAMPLE = 64
"""Weights of a tensor that show whether anything updates it."""


class TrainedTensors(Check):
    """Compares tensors that have a gradient with those that optimizers hold and modules use.

    ``FIRST_LOOKS`` steps, and later observations, look at all modules.
    """

    name = "trained_tensors"

    def _start(self) -> None:
        self._has_backward = False
        self._others: dict[int, Seen] = {}  # at the last look
        self._lines = weakref.WeakKeyDictionary[torch.optim.Optimizer, SourceLine]()
        self._trained, self._frozen = TensorSet(), TensorSet()  # at some look
        self._untied: set[tuple[str, ...]] = set()
        self._copies = weakref.WeakSet[nn.Module]()  # of trained models
        self._outside: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # reported ones, and their model

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the line."""
        if (line := user_line()) is not None:
            self._lines[optimizer] = line

    def backward_end(self) -> None:
        """Gradients are there."""
        self._has_backward = True

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare what this optimizer holds with the gradients of live modules."""
        has_backward, self._has_backward = self._has_backward, False
        is_plain = has_backward and not has_closure and not HUB.backward_depth
        if not (self.due and is_plain and self.run.scope.holds(optimizer)):
            return
        parameters = parameters_of(optimizer)
        self._report_frozen(optimizer, parameters)
        if FIRST_LOOKS <= self.step < FIRST_STEPS:
            return
        held_ids = {id(p) for other in HUB.optimizers.existing() for p in parameters_of(other)}
        parts: set[int] = set()
        replaced: set[int] = set()
        for model in holding(HUB.seen.roots(), {id(p) for p in parameters}):
            lost = [(name, module) for name, module in unregistered(model) if trained(module, held_ids)]
            if lost:
                names = [name for name, _ in lost]
                self.report(facts.Unregistered(self.step, kind_of(model), Names.of(names)))
                parts |= {id(module) for _, module in lost}
            self._note_frozen(model)
            if self._report_replaced(optimizer, model, held_ids):
                replaced.add(id(model))
            if not self.step:
                self._report_shared(model)
        self._report_joined(held_ids)
        self._report_untied(parameters)
        self._report_others(optimizer, parameters, held_ids, parts, replaced)

    def _report_replaced(self, optimizer: torch.optim.Optimizer, model: nn.Module, trained: set[int]) -> bool:
        lost = [n for n in named_parameters(model) if _is_trained(n.parameter, trained)]
        unused = [p for p in parameters_of(optimizer) if p.requires_grad and p.grad is None]
        if not lost or not unused:
            return False
        used = {id(n.parameter) for root in HUB.seen.roots() for n in named_parameters(root)}
        stale = [p for p in unused if id(p) not in used]
        if stale:
            names = [self.name_of(n.parameter) or n.name for n in lost]
            kind, line = type(optimizer).__name__, str(self._lines.get(optimizer, ""))
            self.report(facts.Replaced(self.step, kind, Names.of(names), line, len(stale)))
        return bool(stale)

    def _note_frozen(self, model: nn.Module) -> None:
        for named in named_parameters(model):
            if not named.parameter.requires_grad:
                self._frozen.add(named.parameter)

    def _report_joined(self, held_ids: set[int]) -> None:
        """Report that an optimizer now holds what was reported as outside of all."""
        joined = [key for key, (ref, _) in self._outside.items() if key in held_ids and ref() is not None]
        for model, amount in Counter(self._outside.pop(key)[1] for key in joined).items():
            self.report(facts.Joined(self.step, model, amount))

    def _report_frozen(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        names, gradients = [], []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter.requires_grad:
                self._trained.add(parameter)
            elif parameter in self._trained:
                names.append(self.name_of(parameter))
                gradients.append(local(parameter.grad))
        if not names:
            return
        kind, step = type(optimizer).__name__, self.step
        with torch.no_grad():
            flags = [gradient.detach().ne(0).any() for gradient in gradients]

        def report(*values: NDArray[np.generic]) -> None:
            frozen = [name for name, has_values in zip(names, values, strict=True) if has_values]
            if frozen:
                self.report(facts.FrozenParameters(step, kind, Names.of(frozen)))

        self.when_known(report, *flags)

    def _report_untied(self, parameters: Sequence[torch.Tensor]) -> None:
        trained = {id(p) for p in parameters if p.grad is not None}
        models = holding(HUB.seen.roots(), trained)
        for pair, setting in [*((pair, "") for pair in HUB.seen.untied()), *by_configuration(models)]:
            names = sorted({self.name_of(parameter) for parameter in pair})
            is_new = tuple(names) not in self._untied
            if is_new and len(names) == 2 and all(names) and all(id(weight) in trained for weight in pair):
                self._untied.add(tuple(names))
                self.report(facts.Untied(self.step, Names.of(names), setting))

    def _report_shared(self, model: nn.Module) -> None:
        for name, container in walk(model):
            if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                continue
            children = table_of(container, "_modules").values()
            counts = Counter(id(child) for child in children if child is not None)
            several = {
                id(c): c
                for c in children
                if c is not None and counts[id(c)] > 1 and next(named_parameters(c), None) is not None
            }
            for key, child in several.items():
                self.report(facts.SharedModule(0, name or kind_of(container), kind_of(child), counts[key]))

    def _report_others(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        held_ids: set[int],
        parts: set[int],
        replaced: set[int],
    ) -> None:
        step = self.step
        is_idle = all(p.grad is None for p in parameters)
        if is_idle:
            HUB.seen.scan()  # a copy registers nothing
        shapes = {tuple(p.shape) for p in parameters}
        before, self._others = self._others, {}
        for model in HUB.seen.roots():
            others = [named for named in named_parameters(model) if _is_trained(named.parameter, held_ids)]
            weights = [first_values(local(named.parameter), SAMPLE) for named in others]
            values = self.snapshot(weights)
            now = [Seen.of(named.parameter, values, row) for row, named in enumerate(others)]
            self._others |= {id(named.parameter): seen for named, seen in zip(others, now, strict=True)}
            if others and not step:
                self._note_copy(model, parameters)
            # Models of an earlier run may be around, with the gradients that they had.
            new = [
                Left(named, old, seen)
                for named, seen in zip(others, now, strict=True)
                if (old := before.get(id(named.parameter))) is not None and old.gradient_differs(seen)
            ]
            if not new:
                continue
            is_trained = any(id(named.parameter) in held_ids for named in named_parameters(model))
            if is_idle and not is_trained and {tuple(other.parameter.shape) for other in others} <= shapes:
                kind, name = kind_of(model), type(optimizer).__name__
                self.report(facts.TrainedCopy(step, kind, len(others), name))
                return
            is_loaded = self.schedule.loaded.holds(other.parameter for other in others)
            # In evaluation mode a network in the loss is meant to stay as it is.
            if not is_trained and model.training and id(model) not in parts:
                outside = facts.OutsideModel(step, kind_of(model), is_loaded, Names((), 0))
                self._report_left(model, new, outside)
            elif is_trained and id(model) not in replaced:
                modes = {name: module.training for name, module in walk(model)}
                is_evaluated = not any(modes.get(left.named.module) for left in new)
                is_unfrozen = any(left.named.parameter in self._frozen for left in new)
                more = (is_loaded, Names((), 0), is_evaluated, is_unfrozen)
                self._report_left(model, new, facts.LeftOut(step, kind_of(model), *more))

    def _note_copy(self, model: nn.Module, parameters: Sequence[torch.Tensor]) -> None:
        """Note that a model has the weights of a trained one, as the target network of an agent does."""
        ids = {id(p) for p in parameters}
        mine = [first_values(local(n.parameter), SAMPLE) for n in named_parameters(model)]
        for other in holding(HUB.seen.roots(), ids):
            if other is model or type(other) is not type(model):
                continue
            theirs = [first_values(local(n.parameter), SAMPLE) for n in named_parameters(other)]
            if [x.shape for x in mine] != [x.shape for x in theirs]:
                continue
            values = self.snapshot([*mine, *theirs])
            self.when_known(partial(self._note_equal, weakref.ref(model), values))

    def _note_equal(self, reference: weakref.ref[nn.Module], values: Snapshot) -> None:
        half, model = len(values.arrays) // 2, reference()
        if model is not None and all(map(np.array_equal, values.arrays[:half], values.arrays[half:])):
            self._copies.add(model)

    def _report_left(
        self, model: nn.Module, new: Sequence[Left], fact: facts.OutsideModel | facts.LeftOut
    ) -> None:
        """Report parameters with a gradient that no optimizer holds, unless the script updates them."""
        looks = [(left.before, left.now) for left in new]
        with torch.no_grad():
            gradients = [left.named.parameter.grad for left in new]
            flags = [local(gradient).detach().ne(0).any() for gradient in gradients if gradient is not None]
        names = [self.name_of(left.named.parameter) or left.named.name for left in new]
        references: list[weakref.ref[torch.Tensor]] = [weakref.ref(left.named.parameter) for left in new]
        reference = weakref.ref(model)

        def report(*has_values: NDArray[np.generic]) -> None:
            if not all(np.array_equal(before.weights(), now.weights()) for before, now in looks):
                return
            left = [number for number, flag in enumerate(has_values) if flag]
            if left:
                for number in left:
                    if (parameter := references[number]()) is not None:
                        self._outside[id(parameter)] = (references[number], fact.model)
                left_names, target = Names.of([names[number] for number in left]), reference()
                if isinstance(fact, facts.OutsideModel) and target is not None and target in self._copies:
                    self.report(facts.TargetModel(fact.step, fact.model, fact.is_loaded, left_names))
                else:
                    self.report(replace(fact, names=left_names))

        self.when_known(report, *flags)


@dataclass(frozen=True)
class Left:
    """A parameter that no optimizer holds, at the last two looks."""

    named: NamedParameter
    before: Seen
    now: Seen


@dataclass(frozen=True)
class Seen:
    """What a parameter was at a look: its gradient, the version of that, and some of its weights."""

    gradient: weakref.ref[torch.Tensor]
    version: int
    values: Snapshot
    row: int

    @classmethod
    def of(cls, parameter: torch.Tensor, values: Snapshot, row: int) -> Self:
        """Return it for a parameter with a gradient, whose weights are in a row of ``values``."""
        gradient = parameter.grad
        if gradient is None:
            raise ValueError("the parameter has no gradient, expected one")
        return cls(weakref.ref(gradient), gradient._version, values, row)

    def weights(self) -> NDArray[np.generic]:
        """Return some of its weights, once the host has them."""
        return self.values.arrays[self.row]

    def gradient_differs(self, later: Seen) -> bool:
        """Return whether a backward has written another gradient since."""
        return self.gradient() is not later.gradient() or self.version != later.version


def trained(module: nn.Module, held_ids: set[int]) -> list[torch.Tensor]:
    """Return the parameters that have a gradient and that no optimizer holds."""
    return [n.parameter for n in named_parameters(module) if _is_trained(n.parameter, held_ids)]


def _is_trained(parameter: torch.Tensor, ids: set[int]) -> bool:
    # Of a tensor that is no leaf, torch warns where `.grad` is read.
    is_leaf = parameter.is_leaf or parameter.retains_grad
    return parameter.requires_grad and is_leaf and parameter.grad is not None and id(parameter) not in ids


def unregistered(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a model keeps in plain lists, tuples and dicts, each with its path."""
    registered = {id(module) for _, module in walk(model)}
    for name, module in walk(model):
        for attribute, value in vars(module).items():
            items: Any = ()
            if not attribute.startswith("_") and isinstance(value, (list, tuple)):
                items = enumerate(value)
            elif not attribute.startswith("_") and isinstance(value, dict):
                items = value.items()
            for key, item in items:
                if issubclass(type(item), nn.Module) and id(item) not in registered:
                    yield f"{name}.{attribute}[{key!r}]" if name else f"{attribute}[{key!r}]", item


SETTING = "tie_word_embeddings"


def by_configuration(models: Iterable[nn.Module]) -> Iterator[tuple[tuple[nn.Parameter, nn.Parameter], str]]:
    """Yield the weights of input and output embeddings that differ although ``tie_word_embeddings`` is True.

    Models that name no tied weights do not follow this setting.
    """
    for _, module in (named for model in models for named in walk(model)):
        attributes = vars(module)
        if getattr(attributes.get("config"), SETTING, None) is not True:
            continue
        if not getattr(type(module), "_tied_weights_keys", None):
            continue
        ends = [getattr(module, f"get_{end}_embeddings", None) for end in ("input", "output")]
        if not all(map(callable, ends)):
            continue
        try:
            first, second = (table_of(end(), "_parameters").get("weight") for end in ends if end is not None)
        except Exception as error:
            if is_interrupt(error):
                raise
            continue
        if first is not None and second is not None and first is not second:
            yield (first, second), f"config.{SETTING}"
