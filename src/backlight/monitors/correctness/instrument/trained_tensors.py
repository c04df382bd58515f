"""The tensors that backward reached, compared with those that optimizers hold and modules use."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backlight.capture.hub import HUB, parameters_of
from backlight.capture.modules import holding, kind_of, named_parameters, table_of, walk
from backlight.capture.parameters import local
from backlight.monitors.correctness.instrument.check import NAMED, Check
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from backlight.monitor import RunContext
from backlight.monitors.correctness.instrument.check import Schedule

LOOKS = 4
"""Times that all modules are looked at: what an optimizer holds rarely changes."""


class TrainedTensors(Check):
    """``trained_tensors``: gradients that no optimizer uses, tensors of optimizers that no module uses.

    ``unregistered``: modules in plain containers. ``copy``: the optimizer has no gradient at all, and a model
    of the same shapes has them. ``replaced``: the optimizer holds tensors without a gradient that no module
    uses, and parameters of the model have one and are in no optimizer. ``frozen``: a tensor that was trained
    does not require a gradient any more, and the optimizer goes on with the gradient that it had. ``shared``:
    one module is several children of one container.
    """

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._left = LOOKS
        self._has_backward = False
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # at the last look
        self._lines: weakref.WeakKeyDictionary[torch.optim.Optimizer, SourceLine] = (
            weakref.WeakKeyDictionary()
        )
        self._trained: dict[int, weakref.ref[torch.Tensor]] = {}

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
        own = parameters_of(optimizer)
        self._report_frozen(optimizer, own)
        if not self._left:
            return
        self._left -= 1
        held = {id(p) for one in HUB.optimizers.known() for p in parameters_of(one)}
        step = self.run.clock.index
        for model in holding(HUB.seen.roots(), {id(p) for p in own}):
            lost = [(name, module) for name, module in unregistered(model) if trained(module, held)]
            if lost:
                names = [name for name, _ in lost]
                facts = {"model": kind_of(model), "modules": names[:NAMED], "count": len(names)}
                self.report("trained_tensors", step, kind="unregistered", **facts)
            self._report_replaced(optimizer, model, held, step)
            if not step:
                self._report_shared(model)
        if all(p.grad is None for p in own):
            self._look_for_the_trained_model(optimizer, held, step)

    def _report_replaced(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, held: set[int], step: int
    ) -> None:
        lost = [n for n in named_parameters(model) if _is_trained(n.parameter, held)]
        unused = [p for p in parameters_of(optimizer) if p.requires_grad and p.grad is None]
        if not lost or not unused:
            return
        used = {id(n.parameter) for root in HUB.seen.roots() for n in named_parameters(root)}
        stale = [p for p in unused if id(p) not in used]
        if stale:
            names = [self.name(n.parameter) or n.name for n in lost]
            self.report(
                "trained_tensors",
                step,
                kind="replaced",
                optimizer=type(optimizer).__name__,
                line=str(self._lines.get(optimizer, "")),
                parameters=names[:NAMED],
                count=len(names),
                stale=len(stale),
            )

    def _report_frozen(self, optimizer: torch.optim.Optimizer, own: Sequence[torch.Tensor]) -> None:
        frozen = []
        for parameter in own:
            if parameter.grad is None:
                continue
            known = self._trained.get(id(parameter))
            if parameter.requires_grad:
                if known is None or known() is not parameter:
                    self._trained[id(parameter)] = weakref.ref(parameter)
            elif known is not None and known() is parameter:
                frozen.append((self.name(parameter), local(parameter.grad)))
        if not frozen:
            return
        kind, step = type(optimizer).__name__, self.run.clock.index
        with torch.no_grad():
            flags = [gradient.detach().ne(0).any() for _, gradient in frozen]
            has_values = torch.stack([flag.to(flags[0].device) for flag in flags])

        def report(values: NDArray[np.generic]) -> None:
            names = [name for (name, _), one in zip(frozen, values, strict=True) if one]
            if names:
                facts = {"parameters": names[:NAMED], "count": len(names)}
                self.report("trained_tensors", step, kind="frozen", optimizer=kind, **facts)

        self.when_known(has_values, report)

    def _report_shared(self, model: nn.Module) -> None:
        for name, container in walk(model):
            if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                continue
            children = table_of(container, "_modules").values()
            counts = Counter(id(one) for one in children if one is not None)
            several = {
                id(one): one
                for one in children
                if one is not None and counts[id(one)] > 1 and next(named_parameters(one), None) is not None
            }
            for key, child in several.items():
                facts = {"container": name or kind_of(container), "module": kind_of(child)}
                self.report("trained_tensors", 0, kind="shared", count=counts[key], **facts)

    def _look_for_the_trained_model(
        self, optimizer: torch.optim.Optimizer, held: set[int], step: int
    ) -> None:
        HUB.seen.scan()  # a copy registers nothing
        shapes = {tuple(p.shape) for p in parameters_of(optimizer)}
        before, self._gradients = self._gradients, {}
        for model in HUB.seen.roots():
            others = trained(model, held)
            for parameter in others:
                if (gradient := parameter.grad) is not None:
                    self._gradients[id(parameter)] = (weakref.ref(gradient), gradient._version)
            # Models of an earlier run may be around, with the gradients that they had.
            is_new = any(
                (old := before.get(id(p))) is not None
                and (old[0]() is not p.grad or old[1] != p.grad._version)
                for p in others
                if p.grad is not None
            )
            if is_new and {tuple(p.shape) for p in others} <= shapes:
                facts = {"optimizer": type(optimizer).__name__, "model": kind_of(model), "count": len(others)}
                self.report("trained_tensors", step, kind="copy", **facts)
                return


def trained(module: nn.Module, held: set[int]) -> list[torch.Tensor]:
    """Return the parameters that have a gradient and that no optimizer holds."""
    return [n.parameter for n in named_parameters(module) if _is_trained(n.parameter, held)]


def _is_trained(parameter: torch.Tensor, held: set[int]) -> bool:
    return parameter.requires_grad and parameter.grad is not None and id(parameter) not in held


def unregistered(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a model keeps in plain lists, tuples and dicts, each with its path."""
    known = {id(module) for _, module in walk(model)}
    for name, module in walk(model):
        for attribute, value in vars(module).items():
            items: Any = ()
            if not attribute.startswith("_") and isinstance(value, (list, tuple)):
                items = enumerate(value)
            elif not attribute.startswith("_") and isinstance(value, dict):
                items = value.items()
            for key, item in items:
                if issubclass(type(item), nn.Module) and id(item) not in known:
                    yield f"{name}.{attribute}[{key!r}]" if name else f"{attribute}[{key!r}]", item
