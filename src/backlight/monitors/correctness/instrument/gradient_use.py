"""Whether each gradient is used once, not cleared before that, and clipped only when it is there."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.hub import HUB
from backlight.capture.loss_nodes import sequence_number
from backlight.capture.parameters import local
from backlight.capture.seen_optimizers import parameters_of
from backlight.monitors.correctness.instrument.check import NAMED, Check
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

MAX_PARAMETERS = 64
"""Parameters of one optimizer that are followed, evenly over its list."""

VALUES = 256
"""Values of a gradient that are compared with zero."""

MAX_NODES = 256
"""Nodes of a graph that are visited to tell whether its forward is that of the backward before."""

COMPARED = 4
"""Gradients of an optimizer whose values are compared with those of its last step."""


@dataclass
class _Gradient:
    """The gradient of a parameter as it was at some moment; no reference keeps it alive."""

    parameter: weakref.ref[Tensor]
    tensor: weakref.ref[Tensor]
    version: int
    weight_version: int
    was_added_to: bool = False
    had_values: Tensor | None = None

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

    def is_untouched(self) -> bool:
        """Return whether it is the same tensor, in which nothing has been written."""
        tensor = self.same()
        return tensor is not None and local(tensor)._version == self.version


class GradientUse(Check):
    """Follows the gradients of a sample of parameters from backward to the optimizer and back.

    ``gradients_not_cleared``: an optimizer used a gradient, the next backward added to the same values, and
    the optimizer used the sum; or its last step used the same values, without a backward in between; or one
    loss was propagated back twice. ``gradients_discarded``: what had been accumulated was cleared before any
    optimizer used some of it. ``clipping_order``: a step clips before its first backward, where gradients are
    None, zero or those that the last step used, and not after it. Steps with a closure, and steps inside a
    backward, are left out.
    """

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._closures = 0
        self._all_backwards = 0
        self.forget()

    def forget(self) -> None:
        """Drop every gradient that was noted."""
        self._used: dict[int, _Gradient] = {}  # since the last step of their optimizer
        self._before: dict[int, _Gradient] = {}  # when the backward in progress began
        self._fresh: dict[int, _Gradient] = {}  # of the last backward, used by no optimizer
        # By optimizer, of its last step: the number of backwards until then, and some of its gradients.
        self._stepped: dict[int, tuple[int, list[tuple[_Gradient, Tensor]]]] = {}
        self._root: weakref.ref[Tensor] | None = None
        self._clipped: list[tuple[_Gradient, Tensor]] = []  # by the clipping in progress, with their values
        self._restart()
        self._begin_order(is_known=False)

    def _restart(self) -> None:
        self._forwards = 0
        # By backward since the last step of an optimizer: whether its gradients were cleared, None if kept.
        self._cleared: list[Tensor | None] = []
        self._lines: set[SourceLine | None] = set()
        self._begun: int | None = None  # number of the next node of the graph, as the last one began
        self._is_intended = False

    def _begin_order(self, *, is_known: bool) -> None:
        """Begin a step in which gradients are to come before they are clipped."""
        self._is_order_known, self._passes, self._has_clipped = is_known, 0, False
        # Line of a clipping before all passes, and whether gradients had values that no step has used.
        self._early_clip: tuple[str, Sequence[Tensor]] | None = None

    # Events

    def forward_begin(self) -> None:
        """Count the forwards since the last backward."""
        self._forwards += torch.is_grad_enabled()

    def forward_inputs(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Gradients of an input may be what a backward is for, as in adversarial training."""
        if self.schedule.due and any(
            isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())
        ):
            self._is_intended = True

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Compare what is there before the backward adds to it."""
        if self._closures:
            return
        self._report_second_backward(roots)
        self._used = {key: one for key, one in self._used.items() if one.is_untouched()}
        self._note_values(list(self._used.values()))
        if self._fresh:
            cleared = self._cleared_of(self._fresh.values())
            self._cleared.append(cleared)
            if cleared is not None and not self._forwards and is_older(roots, self._begun):
                # Of one forward, the first backward may be for its norms: a batch has no such excuse.
                self._is_intended = True
        self._fresh, self._forwards = {}, 0
        due = self.due
        if due:
            self._begun = next_node()
            self._lines.add(user_line())
        self._before = self._sampled(self.run.scope.optimizers()) if due else {}

    def backward_end(self) -> None:
        """Note which gradients the backward has changed."""
        if self._closures:
            return
        self._all_backwards += 1
        self._passes += 1
        for one in self._used.values():
            tensor = one.same()
            if tensor is not None and local(tensor)._version > one.version:
                one.version, one.was_added_to = local(tensor)._version, True
        if self.due:
            now = self._sampled(self.run.scope.optimizers())
            self._fresh = {
                key: one
                for key, one in now.items()
                if (before := self._before.get(key)) is None or not before.is_untouched()
            }
            self._note_values(list(self._fresh.values()))
        self._before = {}

    def grad_end(self) -> None:
        """Count gradients that the script may set itself."""
        self._passes += 1

    def clip_begin(self, kind: str, *_: Any) -> None:
        """Note whether the gradients have values: clipping by a norm that overflows makes them zero."""
        self._has_clipped = self._has_clipped or self._passes > 0
        if self.due and self._is_order_known and not self._passes and kind != "refused":
            now = self._sampled(self.run.scope.optimizers())
            unused = [
                g for key, g in now.items() if key not in self._used or not self._used[key].is_untouched()
            ]
            self._early_clip = str(user_line() or ""), self._flags(unused)
        followed = [one for one in self._fresh.values() if one.same() is not None] if self.due else []
        self._clipped = list(zip(followed, self._flags(followed), strict=True))

    def clip_end(self) -> None:
        """Count gradients that clipping has made zero as zero: the script has not cleared them."""
        followed = [(one, had) for one, had in self._clipped if one.same() is not None]
        for (one, had), has in zip(followed, self._flags([one for one, _ in followed]), strict=True):
            one.had_values = (has | ~had) if one.had_values is None else one.had_values & (has | ~had)
        self._clipped = []

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare what the optimizer is about to use with what backward left."""
        if has_closure or HUB.backward_depth:
            self._closures += has_closure
            self.forget()
        elif self.run.scope.holds(optimizer):
            parameters = parameters_of(optimizer)
            held = {id(p) for p in parameters}
            if self._fresh and all(p.grad is None for p in parameters):
                # The backward was for this optimizer and has not reached it, of which there is a finding.
                self._is_intended = True
            self._report_second_step(optimizer)
            self._report_sums(held)
            self._report_cleared(held)
            self._report_order()

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the gradients that were used."""
        if self._closures:
            self._closures -= 1
            self.forget()
        elif self.due and not HUB.backward_depth and self.run.scope.holds(optimizer):
            used = self._sampled([optimizer])
            self._used.update(used)
            followed = [(one, tensor) for one in used.values() if (tensor := one.same()) is not None]
            values = [(one, self._values(tensor).clone()) for one, tensor in followed[:COMPARED]]
            self._stepped[id(optimizer)] = self._all_backwards, values
            self._begin_order(is_known=True)

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """Gradients that a scaler refuses are not discarded by the script."""
        if not stepped:
            self.forget()

    # Comparisons

    @staticmethod
    def _sampled(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, _Gradient]:
        found = {}
        for optimizer in optimizers:
            parameters = parameters_of(optimizer)
            for parameter in parameters[:: -(-len(parameters) // MAX_PARAMETERS) or 1]:
                if (one := _Gradient.of(parameter)) is not None:
                    found[id(parameter)] = one
        return found

    @staticmethod
    def _values(gradient: Tensor) -> Tensor:
        return local(gradient).detach().reshape(-1)[:VALUES]

    @staticmethod
    def _has_values(gradients: Sequence[Tensor]) -> Tensor:
        """Return, per gradient, whether one of its first values is not zero; all on one device."""
        with torch.no_grad():
            flags = [GradientUse._values(g).ne(0).any() for g in gradients]
            return torch.stack([flag.to(flags[0].device) for flag in flags])

    def _note_values(self, gradients: Sequence[_Gradient]) -> None:
        """Note whether there is something to add to: ``.data.zero_()`` leaves no trace but the zeros."""
        for one, flag in zip(gradients, self._flags(gradients) if gradients else (), strict=True):
            one.had_values = flag if one.had_values is None else one.had_values & flag

    def _flags(self, gradients: Sequence[_Gradient]) -> Sequence[Tensor]:
        """Return, per gradient that is still that of its parameter, whether it has values."""
        held = [tensor for one in gradients if (tensor := one.same()) is not None]
        return self._has_values(held).unbind() if held else ()

    def _cleared_of(self, gradients: Iterable[_Gradient]) -> Tensor | None:
        """Return whether all of these gradients were cleared, None where some were kept or used by hand.

        Gradients that backward left at zero lost nothing, whatever was written to them, as by clipping.
        """
        gradients = list(gradients)
        written = []
        for one in gradients:
            parameter = one.parameter()
            if parameter is None or parameter._version != one.weight_version or one.is_untouched():
                return None
            if parameter.grad is not None:
                if one.same() is None:
                    return None
                written.append(parameter.grad)
        had = [one.had_values for one in gradients if one.had_values is not None]
        if not had:
            return None
        lost = torch.stack([flag.to(had[0].device) for flag in had]).any()
        return lost & ~self._has_values(written).any().to(lost.device) if written else lost

    def _report_second_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Report a step with the gradients of the step before, which no backward followed."""
        backwards, before = self._stepped.pop(id(optimizer), (-1, []))
        if backwards != self._all_backwards or not before or not all(one.is_untouched() for one, _ in before):
            return
        step, kind = self.run.clock.index, type(optimizer).__name__
        pairs = [
            (self._values(tensor), values) for one, values in before if (tensor := one.same()) is not None
        ]
        # `.data` can be written without a trace: the values have to be the same ones.
        with torch.no_grad():
            same = [(now == values).all() & (now != 0).any() for now, values in pairs]
            known = torch.stack([flag.to(same[0].device) for flag in same])

        def report(flags: NDArray[np.generic]) -> None:
            if flags.all():
                self.report("gradients_not_cleared", step, kind="second_step", optimizer=kind)

        self.when_known(known, report)

    def _report_second_backward(self, roots: Sequence[Tensor]) -> None:
        """Report a loss that is propagated back again, onto gradients that are still there."""
        before = None if self._root is None else self._root()
        self._root = weakref.ref(roots[0]) if len(roots) == 1 else None
        # Of several values, each backward may be for one of them.
        is_second = before is not None and before is roots[0] and before.numel() == 1
        if self.due and is_second and self._fresh and all(g.is_untouched() for g in self._fresh.values()):
            self.report("gradients_not_cleared", self.run.clock.index, kind="second_backward")

    def _report_order(self) -> None:
        """Report a clipping that came before the gradients of its step."""
        if self._early_clip is None or self._has_clipped or not self._passes:
            return
        line, flags = self._early_clip
        step, unused = self.run.clock.index, torch.stack([*flags]) if flags else torch.zeros(1)

        def report(known: NDArray[np.generic]) -> None:
            if not known.any():
                self.report("clipping_order", step, line=line)

        self.when_known(unused, report)

    def _report_sums(self, held: set[int]) -> None:
        """Report gradients that hold the sum of two steps."""
        step = self.run.clock.index
        own = [self._used.pop(key) for key in held & self._used.keys()]
        summed = [one for one in own if one.was_added_to and one.same() is not None]
        if not summed:
            return
        names = [self.name(p) for one in summed if (p := one.parameter()) is not None]
        flags = torch.stack([one.had_values for one in summed if one.had_values is not None])

        def report(known: NDArray[np.generic]) -> None:
            added = [name for name, flag in zip(names, known, strict=True) if flag]
            if added:
                facts = {"parameters": added[:NAMED], "count": len(added), "followed": len(own)}
                self.report("gradients_not_cleared", step, **facts)

        self.when_known(flags, report)

    def _report_cleared(self, held: set[int]) -> None:
        """Report backward passes whose gradients never reached an optimizer."""
        own = [one for key, one in self._fresh.items() if key in held]
        if not own:
            return
        step, last = self.run.clock.index, self._cleared_of(own)
        is_by_hand = any(
            one.same() is None and (p := one.parameter()) is not None and p.grad is not None for one in own
        )
        is_meant, lines = self._is_intended or is_by_hand, 0 if None in self._lines else len(self._lines)
        names = [self.name(p) for one in own if (p := one.parameter()) is not None]
        each = [*self._cleared, last]
        self._fresh = {}
        self._restart()
        if any(flag is not None for flag in each):
            device = next(flag.device for flag in each if flag is not None)
            none = torch.zeros((), dtype=torch.bool, device=device)
            table = torch.stack([none if flag is None else flag.to(device) for flag in each])
            self.when_known(table, lambda known: self._report_discarded(step, known, names, is_meant, lines))

    def _report_discarded(
        self, step: int, cleared: NDArray[np.generic], names: list[str], is_meant: bool, lines: int
    ) -> None:
        """Report the backward passes whose gradients were cleared; with them go those of earlier ones."""
        facts: dict[str, Any]
        backwards = len(cleared)
        ends = [number for number, flag in enumerate(cleared, start=1) if flag]
        discarded = max(ends, default=0)
        if discarded == backwards:
            facts = {"moment": "step", "parameters": names[:NAMED], "count": len(names)}
            self.report("gradients_discarded", step, **facts)
        elif discarded and not is_meant:
            facts = {"moment": "backward", "discarded": discarded, "backwards": backwards, "lines": lines}
            self.report("gradients_discarded", step, **facts)


def next_node() -> int | None:
    """Return the number of the next node of the autograd graph; None where torch does not tell."""
    return None if sequence_number is None else sequence_number()


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
