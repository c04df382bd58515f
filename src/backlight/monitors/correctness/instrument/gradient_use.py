"""Whether each gradient is used once, not cleared before that, and clipped only when it is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backlight.capture.hub import HUB
from backlight.capture.loss_graph import sequence_number
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.samples import Snapshot, first_values, thinned
from backlight.monitors.correctness.model.facts import Names
from backlight.monitors.correctness.rules import gradient_use as facts
from backlight.user_code import SourceLine, user_line

MAX_PARAMETERS = 64
"""Parameters of one optimizer that are followed, evenly over its list."""

MAX_NODES = 256
"""Nodes of a graph that are visited to tell whether its forward is that of the backward before."""

COMPARED = 4
"""Gradients of an optimizer whose values are compared with those of its last step."""


@dataclass
class _Gradient:
    """The gradient of a parameter as it was at some moment; no reference keeps it alive.

    ``tests`` are whether it had values at each moment that it was looked at, once the host knows.
    """

    parameter: weakref.ref[Tensor]
    tensor: weakref.ref[Tensor]
    version: int
    weight_version: int
    was_added_to: bool = False
    tests: list[Callable[[], bool]] = field(default_factory=list)

    @classmethod
    def of(cls, parameter: Tensor) -> _Gradient | None:
        """Return the gradient of a parameter as it is now, None where it has none."""
        tensor = parameter.grad
        if tensor is None or tensor.layout is not torch.strided:
            return None
        version = local(tensor)._version
        return cls(weakref.ref(parameter), weakref.ref(tensor), version, parameter._version)

    def same(self) -> Tensor | None:
        """Return the tensor if it still is the gradient of the parameter."""
        parameter, tensor = self.parameter(), self.tensor()
        return tensor if parameter is not None and parameter.grad is tensor else None

    def had_values(self) -> bool:
        """Return whether there was something to add to; for :meth:`Check.when_known`."""
        return all(test() for test in self.tests)

    def is_untouched(self) -> bool:
        """Return whether it is the same tensor, in which nothing has been written."""
        tensor = self.same()
        return tensor is not None and local(tensor)._version == self.version


class _Flags:
    """Whether each of some gradients has a value that is not zero; one that is None has none."""

    def __init__(self, check: Check, gradients: Sequence[Tensor | None]) -> None:
        present = [(row, local(gradient)) for row, gradient in enumerate(gradients) if gradient is not None]
        self._rows = [row for row, _ in present]
        self._snapshot = check.snapshot([first_values(tensor) for _, tensor in present], lambda x: x.ne(0))

    def are_there(self, row: int) -> bool:
        """Return whether a gradient has values; for :meth:`Check.when_known`."""
        return row in self._rows and bool(self._snapshot.arrays[self._rows.index(row)].any())

    def any(self) -> bool:
        """Return whether any gradient has."""
        return any(array.any() for array in self._snapshot.arrays)


def _is_kept(before: _Flags, after: _Flags, row: int) -> bool:
    return after.are_there(row) or not before.are_there(row)


class GradientUse(Check):
    """Follows the gradients of a sample of parameters from backward to the optimizer and back.

    Steps with a closure, and steps inside a backward, are left out.
    """

    name = "gradient_use"

    def _start(self) -> None:
        self._closures = 0
        self._all_backwards = 0
        self.forget()

    def forget(self) -> None:
        """Drop every gradient that was noted."""
        self._used: dict[int, _Gradient] = {}  # since the last step of their optimizer
        self._before: dict[int, _Gradient] = {}  # when the backward in progress began
        self._fresh: dict[int, _Gradient] = {}  # of the last backward, used by no optimizer
        # By optimizer, of its last step: the number of backwards until then, and some of its gradients.
        self._stepped: dict[int, tuple[int, list[_Gradient], Snapshot]] = {}
        self._passed: set[int] = set()  # modules that were given something computed, since the last step
        # What a backward left in such modules on its way to parameters that have been updated since.
        self._left: dict[int, _Gradient] = {}
        self._left_by = ""
        self._root: weakref.ref[Tensor] | None = None
        self._clipped: tuple[list[_Gradient], _Flags] | None = None  # by the clipping in progress
        self._restart()
        self._begin_order(is_known=False)

    def _restart(self) -> None:
        self._forwards = 0
        # By backward since the last step of an optimizer: whether its gradients were cleared, None if kept.
        self._cleared: list[Callable[[], bool] | None] = []
        self._lines: set[SourceLine | None] = set()
        self._begun: int | None = None  # number of the next node of the graph, as the last one began
        self._is_intended = False

    def _begin_order(self, *, is_known: bool) -> None:
        """Begin a step in which gradients are to come before they are clipped."""
        self._is_order_known, self._passes, self._has_clipped = is_known, 0, False
        # Line of a clipping before all passes, and whether gradients had values that no step has used.
        self._early_clip: tuple[str, _Flags] | None = None

    # Events

    def forward_begin(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count the forwards since the last backward.

        Gradients of an input may be what a backward is for, as in adversarial training.
        """
        self._forwards += torch.is_grad_enabled()
        if self.schedule.due and any(
            isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())
        ):
            self._is_intended = True
            self._passed.add(id(module))

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Compare what is there before the backward adds to it."""
        if self._closures:
            return
        self._report_second_backward(roots)
        self._used = {key: used for key, used in self._used.items() if used.is_untouched()}
        if self._left:
            self._left = {key: left for key, left in self._left.items() if left.is_untouched()}
            self._note_values(self._left.values())
        self._note_values(self._used.values())
        if self._fresh:
            cleared = self._cleared_of(self._fresh.values())
            self._cleared.append(cleared)
            if cleared is not None and not self._forwards and is_older(roots, self._begun):
                # Of one forward, the first backward may be for its norms: a batch has no such excuse.
                self._is_intended = True
        self._fresh, self._forwards = {}, 0
        due = self.due
        if due:
            self._begun = None if sequence_number is None else sequence_number()
            self._lines.add(user_line())
        self._before = self._sampled(self.run.scope.optimizers()) if due else {}

    def backward_end(self) -> None:
        """Note which gradients the backward has changed."""
        if self._closures:
            return
        self._all_backwards += 1
        self._passes += 1
        for use in (*self._used.values(), *self._left.values()):
            tensor = use.same()
            if tensor is not None and local(tensor)._version > use.version:
                use.version, use.was_added_to = local(tensor)._version, True
        if self.due:
            now = self._sampled(self.run.scope.optimizers())
            self._fresh = {
                key: use
                for key, use in now.items()
                if (before := self._before.get(key)) is None or not before.is_untouched()
            }
            self._note_values(self._fresh.values())
        self._before = {}

    def grad_end(self) -> None:
        """Count gradients that the script may set itself."""
        self._passes += 1

    def clip_begin(self, kind: str, tensors: Sequence[Tensor], *_: Any) -> None:
        """Note whether the gradients have values: clipping by a norm that overflows makes them zero."""
        if self.due and kind != "refused" and all(x.requires_grad and x.grad is None for x in tensors):
            trained = {id(p): p for o in self.run.scope.optimizers() for p in parameters_of(o)}
            # What an optimizer holds may be trained in other steps.
            is_foreign = not any(id(x) in trained for x in tensors)
            if is_foreign and any(p.grad is not None for p in trained.values()):
                self.report(facts.EmptyClip(self.step, str(user_line() or ""), len(tensors)))
        self._has_clipped = self._has_clipped or self._passes > 0
        if self.due and self._is_order_known and not self._passes and kind != "refused":
            now = self._sampled(self.run.scope.optimizers())
            unused = [
                g for key, g in now.items() if key not in self._used or not self._used[key].is_untouched()
            ]
            self._early_clip = str(user_line() or ""), self._flags(unused)
        if self.due and self._fresh:
            followed = list(self._fresh.values())
            self._clipped = followed, self._flags(followed)

    def clip_end(self) -> None:
        """Count gradients that clipping has made zero as zero: the script has not cleared them."""
        clipped, self._clipped = self._clipped, None
        if clipped is not None:
            followed, before = clipped
            after = self._flags(followed)
            for row, gradient in enumerate(followed):
                if gradient.same() is not None:
                    gradient.tests.append(partial(_is_kept, before, after, row))

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare what the optimizer is about to use with what backward left."""
        if has_closure or HUB.backward_depth:
            self._closures += has_closure
            self.forget()
        elif self.run.scope.holds(optimizer):
            parameters = parameters_of(optimizer)
            keys = {id(p) for p in parameters}
            if self._fresh and all(p.grad is None for p in parameters):
                # The backward was for this optimizer and has not reached it, of which there is a finding.
                self._is_intended = True
            self._report_second_step(optimizer)
            self._report_sums(keys)
            if self._left or self._passed:
                self._report_left(keys, type(optimizer).__name__)
            self._report_cleared(keys)
            self._report_order()

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the gradients that were used."""
        if self._closures:
            self._closures -= 1
            self.forget()
        elif self.due and not HUB.backward_depth and self.run.scope.holds(optimizer):
            used = self._sampled([optimizer])
            self._used.update(used)
            compared = list(used.values())[:COMPARED]
            self._stepped[id(optimizer)] = self._all_backwards, compared, self._snapshot_of(compared)
            self._begin_order(is_known=True)

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """Gradients that a scaler refuses are not discarded by the script."""
        if not stepped:
            self.forget()

    # Comparisons

    @staticmethod
    def _sampled(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, _Gradient]:
        return {
            id(parameter): gradient
            for optimizer in optimizers
            for parameter in thinned(parameters_of(optimizer), MAX_PARAMETERS)
            if (gradient := _Gradient.of(parameter)) is not None
        }

    def _flags(self, gradients: Iterable[_Gradient]) -> _Flags:
        return _Flags(self, [gradient.same() for gradient in gradients])

    def _snapshot_of(self, gradients: Iterable[_Gradient]) -> Snapshot:
        tensors = [tensor for gradient in gradients if (tensor := gradient.same()) is not None]
        return self.snapshot([first_values(local(tensor)) for tensor in tensors])

    def _note_values(self, gradients: Collection[_Gradient]) -> None:
        """Note whether there is something to add to: ``.data.zero_()`` leaves no trace but the zeros."""
        if gradients:
            values = self._flags(gradients)
            for row, gradient in enumerate(gradients):
                gradient.tests.append(partial(values.are_there, row))

    def _cleared_of(self, gradients: Collection[_Gradient]) -> Callable[[], bool] | None:
        """Return whether all of these gradients were cleared, None where some were kept or used by hand.

        Gradients that backward left at zero lost nothing, whatever was written to them, as by clipping.
        """
        written = []
        for gradient in gradients:
            parameter = gradient.parameter()
            if parameter is None or parameter._version != gradient.weight_version or gradient.is_untouched():
                return None
            if parameter.grad is not None:
                if gradient.same() is None:
                    return None
                written.append(local(parameter.grad))
        noted = [gradient.had_values for gradient in gradients if gradient.tests]
        if not noted:
            return None
        # Of a whole gradient: rows of an embedding are made zero to freeze them.
        largest = (
            torch._foreach_norm([part for part in written if part.numel()], torch.inf) if written else []
        )
        values = self.snapshot([value.reshape(1) for value in largest])
        return lambda: any(had() for had in noted) and not any(array.any() for array in values.arrays)

    def _report_second_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Report a step with the gradients of the step before, which no backward followed."""
        backwards, before, values = self._stepped.pop(id(optimizer), (-1, [], None))
        is_same = backwards == self._all_backwards and all(gradient.is_untouched() for gradient in before)
        if values is None or not before or not is_same:
            return
        step, kind, now = self.step, type(optimizer).__name__, self._snapshot_of(before)

        def report() -> None:
            # `.data` can be written without a trace: the values have to be the same ones.
            pairs = zip(now.arrays, values.arrays, strict=True)
            if all(np.array_equal(new, old) and (new != 0).any() for new, old in pairs):
                self.report(facts.SecondStep(step, kind))

        self.when_known(report)

    def _report_second_backward(self, roots: Sequence[Tensor]) -> None:
        """Report a loss that is propagated back again, onto gradients that are still there."""
        before = None if self._root is None else self._root()
        self._root = weakref.ref(roots[0]) if len(roots) == 1 else None
        # Of several values, each backward may be for one of them.
        is_second = before is not None and before is roots[0] and before.numel() == 1
        if self.due and is_second and self._fresh and all(g.is_untouched() for g in self._fresh.values()):
            self.report(facts.SecondBackward(self.step))

    def _report_order(self) -> None:
        """Report a clipping that came before the gradients of its step."""
        if self._early_clip is None or self._has_clipped or not self._passes:
            return
        line, unused = self._early_clip
        step = self.step

        def report() -> None:
            if not unused.any():
                self.report(facts.EarlyClip(step, line))

        self.when_known(report)

    def _report_sums(self, keys: set[int]) -> None:
        """Report gradients that hold the sum of two steps."""
        step = self.step
        uses = [self._used.pop(key) for key in list(self._used) if key in keys]
        summed = [use for use in uses if use.was_added_to and use.same() is not None]
        if not summed:
            return
        names = [self.name_of(p) for use in summed if (p := use.parameter()) is not None]

        def report() -> None:
            added = [name for name, use in zip(names, summed, strict=True) if use.had_values()]
            if added:
                self.report(facts.SummedGradients(step, Names.of(added), len(uses)))

        self.when_known(report)

    def _report_left(self, keys: set[int], optimizer: str) -> None:
        """Report gradients of another optimizer's loss in what this one uses; note what it leaves itself."""
        step, other = self.step, self._left_by
        uses = [self._left.pop(key) for key in list(self._left) if key in keys]
        summed = [use for use in uses if use.was_added_to and use.same() is not None]
        names = [self.name_of(p) for use in summed if (p := use.parameter()) is not None]
        passed, self._passed = self._passed, set()
        if not any(key in keys for key in self._fresh):
            passed = set()  # what the backward was for comes with another optimizer
        through = {id(p) for root in HUB.seen.roots() if id(root) in passed for p in root.parameters()}
        if left := {key: use for key, use in self._fresh.items() if key in through - keys}:
            self._left, self._left_by = left, optimizer

        def report() -> None:
            added = [name for name, use in zip(names, summed, strict=True) if use.had_values()]
            if added:
                self.report(facts.LeftByOther(step, Names.of(added), optimizer, other))

        if summed:
            self.when_known(report)

    def _report_cleared(self, keys: set[int]) -> None:
        """Report backward passes whose gradients never reached an optimizer."""
        uses = [use for key, use in self._fresh.items() if key in keys]
        if not uses:
            return
        step, last = self.step, self._cleared_of(uses)
        is_by_hand = any(
            use.same() is None and (p := use.parameter()) is not None and p.grad is not None for use in uses
        )
        is_meant, lines = self._is_intended or is_by_hand, 0 if None in self._lines else len(self._lines)
        names = [self.name_of(p) for use in uses if (p := use.parameter()) is not None]
        each = [*self._cleared, last]
        self._fresh = {}
        self._restart()

        def report() -> None:
            cleared = [number for number, test in enumerate(each, start=1) if test is not None and test()]
            discarded = max(cleared, default=0)  # gradients of earlier ones were cleared with them
            if discarded == len(each):
                self.report(facts.ClearedBeforeStep(step, Names.of(names)))
            elif discarded and not is_meant:
                self.report(facts.DiscardedBackwards(step, discarded, len(each), lines))

        self.when_known(report)


def is_older(roots: Sequence[Tensor], number: int | None) -> bool:
    """Return whether a graph has a node from before ``number`` above its first leaf; True where unknown."""
    if number is None or not roots:
        return True
    node = roots[0].grad_fn
    for _ in range(MAX_NODES):
        if node is None or not node.next_functions:
            break
        if node._sequence_nr() < number:
            return True
        node = node.next_functions[0][0]
    return False
