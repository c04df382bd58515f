"""The mode of modules in training and in evaluations, and calls that were to prepare them."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.spectral_norm import SpectralNorm

from backlight.capture.functional_calls import DropoutCalls
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of, named_parameters, walk
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.loader_batches import data_of, length
from backlight.monitors.correctness.instrument.samples import Snapshot
from backlight.monitors.correctness.model.facts import NAMED, Names
from backlight.monitors.correctness.rules import module_modes as facts
from backlight.monitors.correctness.rules.gradient_use import LeftByEvaluation
from backlight.user_code import definition, user_line

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable

TRAINED_SHARE = 0.5
"""Share of the weights of a model that the optimizer holds, below which evaluation mode may be intended."""


class ModuleModes(Check):
    """``module_modes``: every dropout and trained batch norm of a model is in evaluation mode in training.

    A model that is mostly frozen is left out, as everything below a new head. Of a model whose root is in
    training mode the same is reported of parts with dropout that hold most of what is trained: batch norms
    alone are often frozen on purpose. It may be meant as well where weights come from a file, and only batch
    norms are concerned. Once the classes of each model are looked at: their own ``train()`` may not have been
    called.
    """

    name = "module_modes"
    steps = "all"

    def _start(self) -> None:
        self._table: ParameterTable | None = None  # whose models had their classes looked at
        self._rows: dict[int, int] | None = None
        self._models: list[weakref.ref[nn.Module]] = []
        self._modes: list[bool] = []
        self._has_changed = False  # since the first observed step

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Read the mode of each model; those of all its modules only at an observed step, or at a change."""
        scope, is_due = self.run.scope, self.due
        if is_due and self._table is not scope.table:
            self._table = scope.table
            trained_models = scope.roots({id(p) for p in parameters_of(optimizer)})
            for name, module in (named for model in trained_models for named in walk(model)):
                if type(module).train is not nn.Module.train and HUB.seen.is_modeless(module):
                    self._report_train(name, module)
        models = [model for reference in self._models if (model := reference()) is not None]
        if self._rows is not scope.table.rows or len(models) < len(self._models):
            self._rows, self._modes = scope.table.rows, []
            models = scope.roots({id(t) for t in scope.table.tensors()})
            self._models = [weakref.ref(model) for model in models]
        before, self._modes = self._modes, [model.training for model in models]
        is_change = bool(before) and before != self._modes
        self._has_changed = self._has_changed or is_change
        if not (is_due or (is_change and not all(self._modes))) or not scope.holds(optimizer):
            return
        trained_ids = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
        for model in models:
            self._report(model, trained_ids)

    def _report(self, model: nn.Module, trained_ids: set[int]) -> None:
        modules = list(walk(model))
        relevant = [
            (name, module)
            for name, module in modules
            if is_dropout(module) or (is_batch_norm(module) and id(module.weight) in trained_ids)
        ]
        evaluated = [named for named in relevant if not named[1].training]
        if not evaluated:
            return
        parts: tuple[str, ...] = ()
        if model.training:
            parts = tuple(
                name for name, part in _outermost_evaluated(modules) if _mostly_trained(part, trained_ids)
            )
            evaluated = [named for named in evaluated if _is_below(named[0], parts)]
            is_whole = len(evaluated) == len(relevant)
            parameters = {
                id(n.parameter): n for n in named_parameters(model) if id(n.parameter) in trained_ids
            }
            sizes = [(named.name, named.parameter.numel()) for named in parameters.values()]
            inside = sum(size for name, size in sizes if _is_below(name, parts))
            if not is_whole and inside < TRAINED_SHARE * sum(size for _, size in sizes):
                return
            if any(module.training for name, module in relevant if _is_below(name, parts)):
                return
        elif len(evaluated) < len(relevant) or not _mostly_trained(model, trained_ids):
            return
        drops = any(is_dropout(module) for _, module in evaluated)
        if model.training and not drops:
            return
        is_loaded = self.schedule.loaded.holds(named.parameter for named in named_parameters(model))
        may_be_meant = bool(parts) or (is_loaded and not drops and not self._has_changed)
        active = _active(evaluated)
        self.report(facts.TrainedInEvaluation(self.step, kind_of(model), active, parts, may_be_meant))

    def _report_train(self, name: str, module: nn.Module) -> None:
        train = type(module).train
        if not isinstance(train, FunctionType) or "train" not in train.__code__.co_names:
            return  # one that does not call that of its base class leaves no trace
        called = names_in(train.__code__, type(module))
        parameters, below = list(module.parameters()), [m for m in module.modules() if m is not module]
        does = []
        if called & {"requires_grad", "requires_grad_"} and all(p.requires_grad for p in parameters):
            does.append("freezes parameters")
        if "eval" in called and all(m.training for m in below):
            does.append("puts modules into evaluation mode")
        if does and parameters:
            line = str(definition(train) or "")
            self.report(facts.TrainNotCalled(self.step, kind_of(module), name, " and ".join(does), line))


def _outermost_evaluated(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the modules in evaluation mode that are in no other one; a parent comes before its children."""
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        if not module.training and not _is_below(name, tuple(part for part, _ in outermost)):
            outermost.append((name, module))
    return outermost


def _is_below(name: str, parts: Sequence[str]) -> bool:
    return name.startswith(tuple(f"{part}." for part in parts))


def _mostly_trained(module: nn.Module, trained_ids: set[int]) -> bool:
    """Return whether the optimizer holds enough of the weights of ``module``."""
    sizes = {id(n.parameter): n.parameter.numel() for n in named_parameters(module)}
    trained = sum(size for key, size in sizes.items() if key in trained_ids)
    return 0 < trained >= TRAINED_SHARE * sum(sizes.values())


def is_dropout(module: nn.Module) -> TypeGuard[_DropoutNd]:
    """Return whether a module drops values in training mode."""
    return isinstance(module, _DropoutNd) and module.p > 0


def is_batch_norm(module: nn.Module) -> TypeGuard[_NormBase]:
    """Return whether a module keeps running statistics."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def statistics_of(norms: Sequence[_NormBase]) -> list[Tensor]:
    """Return the running means and variances of batch norms, by turns."""
    both = [s for norm in norms for s in (norm.running_mean, norm.running_var)]
    return [s.detach().reshape(-1) for s in both if s is not None]


def initial_norms(names: Sequence[str], statistics: Snapshot) -> list[str]:
    """Return the names of the batch norms whose mean is 0 and whose variance is 1."""
    pairs = zip(names, statistics.arrays[::2], statistics.arrays[1::2], strict=True)
    return [name for name, mean, variance in pairs if not mean.any() and (variance == 1).all()]


def _active(modules: Sequence[tuple[str, nn.Module]]) -> facts.Active:
    """Return what modules of dropout and batch norm there are."""
    kinds = dict(Counter(kind_of(module) for _, module in modules))
    names = tuple(name for name, _ in modules[:NAMED])
    return facts.Active(names, kinds, sum(is_dropout(module) for _, module in modules))


ESTIMATED = 0.5
"""Share of its norm that a weight's vector has along its power iteration, below which none has run: after one
iteration it is 1, and of two random vectors near 0."""

BATCHES = 2
"""Batches in a row without a backward that make an evaluation."""

NORMS = 8
"""Batch norms, or spectral norms, of a model that are read."""


PHASES = 4
"""Phases, by turns of training and of evaluation, each with :data:`BATCHES` steps, that are a pattern."""


class PhaseSteps(Check):
    """Observes a model that takes steps on one data set in training mode, on another in evaluation mode.

    A phase is a row of steps on the batches of one data set, each after a forward of one model in one mode.
    """

    name = "phase_steps"
    steps = "all"

    def _start(self) -> None:
        self._names: dict[int, str] = {}
        self._source: int | None = None  # the data set of a batch since the last step
        self._call: tuple[weakref.ref[nn.Module], bool] | None = None
        self._phases: list[tuple[int, int, bool, int]] = []  # model, data set, mode, and steps

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note the data set."""
        data = getattr(iterator, "_dataset", None)
        self._source = id(data)
        if id(data) not in self._names and len(self._names) < NORMS:
            self._names[id(data)] = f"{data_of(iterator)} with {length(data)} samples"

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the mode."""
        if HUB.forward_depth == 1 and torch.is_grad_enabled() and not HUB.backward_depth:
            self._call = weakref.ref(module), module.training

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Count a step of the phase, or begin the next one."""
        source, call = self._source, self._call
        self._source = self._call = None
        model = None if call is None else call[0]()
        if source is None or call is None or model is None or not self.run.scope.holds(optimizer):
            return
        phase, count = (id(model), source, call[1]), 1
        if self._phases and self._phases[-1][:3] == phase:
            count = self._phases.pop()[3] + 1
        self._phases = [*self._phases[1 - PHASES :], (*phase, count)]
        if count == BATCHES and len(self._phases) == PHASES and not call[1]:
            self._compare(model, self._phases)

    def _compare(self, model: nn.Module, phases: Sequence[tuple[int, int, bool, int]]) -> None:
        trained, evaluated = phases[:2]
        is_pattern = [phase[:3] for phase in phases[2:]] == [trained[:3], evaluated[:3]]
        is_short = any(count < BATCHES for *_, count in phases)
        if is_pattern and not is_short and trained[2] and trained[1] != evaluated[1]:
            first, second = (self._names.get(source, "a data set") for _, source, *_ in (trained, evaluated))
            line = str(user_line() or "")
            self.report(facts.StepsOnEvaluation(self.step, kind_of(model), first, second, line))
            HUB.remove(self)


class EvaluationModes(Check):
    """Observes forwards without gradients of a model that is being trained.

    A model in training mode is reported where no backward follows the batches of the data set: those of the
    training set may serve to estimate statistics, and several forwards of one batch to sample from dropout.
    Of batch norms, those with trained weights that are in training mode when the model trains are read; of
    spectral norms, whether a power iteration has run, also before the first step.
    """

    name = "evaluation_modes"
    steps = "all"

    def _start(self) -> None:
        self._source = 0  # the data set of the last batch
        self._trained: set[int] = set()
        self._trained_norms: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._batches = 0  # of that data set, each with a forward, in a row and without a backward
        self._called: list[weakref.ref[nn.Module]] | None = []  # for the last batch; None with gradients
        self._evaluations = self._looks = 0
        self._calls = DropoutCalls()
        self._model: nn.Module | None = None  # whose dropout is observed
        self._mode = 0, True  # model of the last forward with gradients, and its mode
        # By model: the step in progress when it had a backward in evaluation mode, how many, and the line.
        self._evaluated: dict[int, tuple[int, int, str]] = {}

    # Events

    def batch_begin(self, source: int) -> None:
        """Count the batch before, whose backward would have come by now."""
        called = [module for reference in self._called or () if (module := reference()) is not None]
        is_once = len({id(module) for module in called}) == len(called)
        self._batches = self._batches + 1 if called and is_once else 0
        if self._batches == BATCHES and self._trained and self._source not in self._trained:
            self._report_training_mode(called)
        if source != self._source:
            self._batches = 0
        self._source, self._called = source, []

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """The last batch is one to learn from."""
        self._trained.add(self._source)
        self._called = None
        model, is_training = self._mode
        if not is_training and self.run.clock.done:
            step, passes, line = self._evaluated.get(model, (-1, 0, ""))
            same = step == self.step
            line = line if same else str(user_line() or "")
            self._evaluated[model] = self.step, passes + 1 if same else 1, line
        elif self._evaluated and is_training:
            self._report_evaluated(model)

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note which model is evaluated, and observe it at the first evaluations and then ever fewer."""
        is_outermost = HUB.forward_depth == 1
        if is_outermost and not module.training and not is_capturing_graph() and not is_transforming():
            self._looks += 1
            if self._looks & (self._looks - 1) == 0:
                self._compare_norms(module)
        if torch.is_grad_enabled():
            self._called = None
            if is_outermost:
                self._mode = id(module), module.training
            if is_outermost and self.schedule.due:
                self._trained_norms.update(m for _, m in walk(module) if is_batch_norm(m) and m.training)
        elif is_outermost and self.run.clock.done and not HUB.backward_depth:
            if module.training:
                if self._called is not None:
                    self._called.append(weakref.ref(module))
            elif not is_capturing_graph() and not is_transforming():
                self._evaluations += 1
                if self._evaluations & (self._evaluations - 1) == 0:
                    self._observe(module)

    def forward_end(self, module: nn.Module, result: Any) -> None:
        """Report the dropout of the forward that was observed."""
        if HUB.forward_depth == 1 and (model := self._model) is not None:
            self._model = None
            self._calls.stop()
            calls, self._calls.rows = self._calls.rows, []
            for function, p, line in calls[:1]:
                kind = kind_of(model)
                self.report(facts.DropoutInEvaluation(self.step, kind, function, float(p), str(line or "")))

    # Comparisons

    def _observe(self, model: nn.Module) -> None:
        modules = [module for _, module in walk(model)]
        if not any(module.training for module in modules) and self._calls.start():
            self._model = model
        trained_ids = {id(p) for optimizer in self.run.scope.optimizers() for p in parameters_of(optimizer)}
        norms = [
            (name, module)
            for name, module in walk(model)
            if is_batch_norm(module)
            and module in self._trained_norms
            and not module.training
            and id(module.weight) in trained_ids
        ][:NORMS]
        if not norms:
            return
        values = self.snapshot(statistics_of([module for _, module in norms]))
        names, step, kind = [name for name, _ in norms], self.step, kind_of(model)

        def report() -> None:
            if initial := initial_norms(names, values):
                self.report(facts.InitialStatistics(step, kind, Names.of(initial)))

        self.when_known(report)

    def _report_evaluated(self, key: int) -> None:
        """Report gradients of an evaluation that a backward in training mode is about to add to."""
        step, passes, line = self._evaluated.pop(key, (-1, 0, ""))
        model = next((root for root in HUB.seen.roots() if id(root) == key), None)
        if step != self.step or model is None:
            return
        parameters = [(n.name, n.parameter) for n in named_parameters(model) if n.parameter.grad is not None]
        parameters = parameters[:NORMS]
        gradients = [local(p.grad).detach() for _, p in parameters if p.grad is not None]
        kind = kind_of(model)

        def report(*has_values: NDArray[np.generic]) -> None:
            names = [name for (name, _), flag in zip(parameters, has_values, strict=True) if flag]
            if names:
                self.report(LeftByEvaluation(step, kind, Names.of(names), passes, line))

        if gradients:
            with torch.no_grad():
                self.when_known(report, *(gradient.ne(0).any() for gradient in gradients))

    def _report_training_mode(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            active = [
                (name, module)
                for name, module in walk(model)
                if module.training and (is_dropout(module) or is_batch_norm(module))
            ]
            # Without a momentum, batch norm averages over all batches: statistics are being estimated.
            if active and all(getattr(module, "momentum", 0.0) is not None for _, module in active):
                self.report(facts.EvaluatedInTraining(self.step, kind_of(model), _active(active)))

    def _compare_norms(self, model: nn.Module) -> None:
        hooks = [
            (name, hook, module)
            for name, module in walk(model)
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, SpectralNorm)
        ][:NORMS]
        if not hooks:
            return
        with torch.no_grad():
            shares = []
            for _, hook, module in hooks:
                weight = hook.reshape_weight_to_matrix(getattr(module, f"{hook.name}_orig"))
                u, v = (getattr(module, f"{hook.name}_{vector}") for vector in "uv")
                image = torch.mv(weight, v)
                shares.append(torch.dot(u, image) / image.norm().clamp(min=1e-30))
        names, step, kind = [name for name, *_ in hooks], self.step, kind_of(model)

        def report(*values: NDArray[np.generic]) -> None:
            random = [name for name, v in zip(names, values, strict=True) if abs(float(v)) < ESTIMATED]
            if random:
                self.report(facts.RandomSpectralNorm(step, kind, Names.of(random)))

        self.when_known(report, *shares)


def names_in(code: CodeType, owner: type) -> set[str]:
    """Return the names that a method uses, and those of the methods of ``owner`` that it names."""
    names = set(code.co_names)
    for name in code.co_names:
        method = inspect.getattr_static(owner, name, None)
        if isinstance(method, FunctionType) and not method.__module__.startswith("torch."):
            names |= set(method.__code__.co_names)
    return names
