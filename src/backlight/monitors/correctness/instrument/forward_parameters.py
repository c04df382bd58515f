"""Parameters that a forward creates, and that are gone by the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from backlight.capture.hub import HUB
from backlight.capture.modules import Registration
from backlight.capture.optimizers import parameters_of
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.rules.trained_tensors import MadeInForward


class ForwardParameters(Check):
    """Compares parameters that are registered in a forward, and reached by its backward, with the next ones.

    Where the same line registers others at a later step, and the module of the earlier ones is gone, nothing
    can have been trained. One that is built lazily, or kept for a shape, is still there.
    """

    name = "forward_parameters"

    def _start(self) -> None:
        self.forget()
        self._earlier: dict[
            tuple[str, str], tuple[int, Registration]
        ] = {}  # by layer and line; and their step

    def forget(self) -> None:
        """Stop to record registrations."""
        self._made, HUB.seen.registered = list[Registration](), None

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record registrations during the outermost forward."""
        if HUB.forward_depth == 1 and self.due and torch.is_grad_enabled():
            HUB.seen.registered = []

    def forward_end(self, module: nn.Module, result: Any) -> None:
        """Take the registered parameters that an inner loop has not trained."""
        if HUB.forward_depth == 1 and HUB.seen.registered is not None:
            registered, HUB.seen.registered = HUB.seen.registered, None
            for registration in registered:
                if (parameter := registration.parameter()) is not None and parameter.grad is None:
                    self._made.append(registration)

    def backward_end(self) -> None:
        """Compare those that have a gradient now with those of an earlier step."""
        made, self._made = self._made, []
        ids = (
            {id(p) for optimizer in HUB.optimizers.existing() for p in parameters_of(optimizer)}
            if made
            else ()
        )
        reached = [
            entry
            for entry in made
            if (parameter := entry.parameter()) is not None
            and parameter.grad is not None
            and id(parameter) not in ids
        ]
        anew: dict[tuple[str, str], bool] = {}  # whether a matrix is among the parameters of each layer
        for record in reached:
            key = (record.kind, str(record.line or ""))
            step, earlier = self._earlier.get(key, (self.step, record))
            if step < self.step and earlier.module() is None:
                anew[key] = anew.get(key, False) or record.dimensions > 1
        self._earlier |= {(record.kind, str(record.line or "")): (self.step, record) for record in reached}
        if anew:
            self._report(list(anew), any(anew.values()))

    def _report(self, layers: Sequence[tuple[str, str]], is_random: bool) -> None:
        kinds, lines = (tuple(column) for column in zip(*layers, strict=True))
        self.report(MadeInForward(self.step, kinds, lines, is_random))
