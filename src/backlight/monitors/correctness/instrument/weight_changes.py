"""Whether weights change only in the optimizer's step: a sample after it, at forward and at backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB, parameters_of
from backlight.capture.parameters import local
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import NAMED, Check
from backlight.records import Layout

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

MAX_PARAMETERS = 12
"""Parameters that are followed, evenly over those that the optimizers train."""

VALUES = 64
"""Weights of a parameter that are compared."""

UNCHANGED = 0.5
"""Share of the weights with a gradient that a step leaves as they were, from which on that is reported."""

TOLERANCE = 1e-3
"""Relative deviation from a common factor up to which weights count as rescaled."""


class WeightChanges(Check):
    """``weights_changed``: weights differ between an optimizer's step, the next forward and its backward.

    ``updates_rounded_away``: weights with a gradient are the same before and after the step, because it is
    smaller than the spacing of their type. Weights that were clipped to a constant, set to zero or rescaled
    as a whole are not reported as changed.
    """

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._table: ParameterTable | None = None
        self._followed: list[
            tuple[str, int, int, Tensor]
        ] = []  # name, row of the table, size, index of weights
        self._before: Tensor | None = None  # the step that is in progress, or the last one
        self._after: Tensor | None = None  # that step; None once compared
        self._forward: Tensor | None = None
        self._step = 0
        self._comparisons = 0
        self._steps = 0

    def forget(self) -> None:
        """Drop the weights of the last step."""
        self._before = self._after = self._forward = None

    # Events

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Read the weights before they are updated."""
        self._after = self._forward = None
        is_plain = not has_closure and not HUB.backward_depth and self.run.scope.holds(optimizer)
        self._before = self._read() if self.due and is_plain else None
        self._step = self.run.clock.index

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the weights that the optimizer leaves."""
        before = self._before
        self._after = after = self._read() if before is not None else None
        if before is not None and after is not None and before.shape == after.shape:
            self._compare_over_step(optimizer, before, after)

    def forward_begin(self) -> None:
        """Compare with the last step, and read the weights of this forward."""
        if torch.is_grad_enabled() and not HUB.backward_depth and not is_transforming():
            self._compare_with_step()
            if self._forward is None and self.due:
                self._forward = self._read()

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Compare with the forward."""
        self._compare_with_step()  # where no forward was reported
        forward, self._forward = self._forward, None
        now = self._read() if forward is not None else None
        if forward is None or now is None or now.shape != forward.shape:
            return
        step, names = self.run.clock.index, [name for name, *_ in self._followed]

        def report(known: NDArray[np.generic]) -> None:
            changed = [name for name, one in zip(names, known, strict=True) if one]
            if changed:
                facts = {"moment": "backward", "parameters": changed[:NAMED], "count": len(changed)}
                self.report("weights_changed", step, **facts, followed=len(names))

        self.when_known((now != forward).any(dim=1), report)

    # Comparison

    def _compare_over_step(self, optimizer: torch.optim.Optimizer, before: Tensor, after: Tensor) -> None:
        """Count the weights with a gradient that the step left as they were."""
        rate = optimizer.param_groups[0].get("lr")
        own = {id(p) for p in parameters_of(optimizer)}
        rows = [
            (number, parameter)
            for number, (_, row, _, _) in enumerate(self._followed)
            if (parameter := self._tensor(row)) is not None and id(parameter) in own
        ]
        # A tensor as rate, or a fused step that is skipped on the device, is not read here.
        if not isinstance(rate, float) or not rate or getattr(optimizer, "found_inf", None) is not None:
            return
        with torch.no_grad():
            counts = []
            for number, parameter in rows:
                gradient = None if parameter.grad is None else local(parameter.grad)
                if gradient is not None and gradient.layout is torch.strided and gradient.is_contiguous():
                    values = gradient.detach().reshape(-1)[self._followed[number][3]]
                    used = (values != 0) & values.isfinite()
                    same = used & (before[number] == after[number])
                    counts.append(torch.stack((used.sum(), same.sum())))
            if not counts:
                return
            size = before.abs().mean()
            known = torch.cat((torch.stack(counts).sum(0).float(), size[None]))
        self._steps += 1
        step, steps = self._step, self._steps
        dtype = str(rows[0][1].dtype).removeprefix("torch.")

        def report(known: NDArray[np.generic]) -> None:
            used, same, size = (float(one) for one in known)
            if used and same >= UNCHANGED * used:
                facts = {"share": same / used, "rate": rate, "dtype": dtype, "size": size}
                self.report("updates_rounded_away", step, comparisons=steps, **facts)

        self.when_known(known, report)

    def _tensor(self, row: int) -> Tensor | None:
        return None if self._table is None else self._table.tensor(row)

    def _compare_with_step(self) -> None:
        before, after = self._before, self._after
        self._before = self._after = None
        now = self._read() if after is not None else None
        if before is None or after is None or now is None or not before.shape == after.shape == now.shape:
            return
        self._comparisons += 1
        step, comparisons = self._step, self._comparisons
        names = [name for name, *_ in self._followed]
        with torch.no_grad():
            table = _comparison(before, after, now)

        def report(known: NDArray[np.generic]) -> None:
            if (facts := _described(known.astype(float), names)) is not None:
                self.report(
                    "weights_changed",
                    step,
                    moment="step",
                    comparisons=comparisons,
                    followed=len(names),
                    **facts,
                )

        self.when_known(table, report)

    # Sample

    def _read(self) -> Tensor | None:
        """Return ``[P, VALUES]`` weights, None where they cannot be read."""
        if is_capturing_graph() or is_transforming():
            return None
        if self._table is not self.run.scope.table:
            self._table = self.run.scope.table
            self._followed = self._chosen()
        rows = []
        with torch.no_grad():
            for _, row, size, index in self._followed:
                parameter = self._table.tensor(row)
                part = None if parameter is None else local(parameter).detach()
                if part is None or part.numel() != size or part.device != index.device:
                    return None
                # NaN is not equal to itself: weights that are not finite count as 0.
                rows.append(part.reshape(-1)[index].float().nan_to_num(0.0, 0.0, 0.0))
        return torch.stack(rows) if rows else None

    def _chosen(self) -> list[tuple[str, int, int, Tensor]]:
        """Return what is followed: contiguous weights on one device, none that a flat parameter holds."""
        table, found = self.run.scope.table, []
        for optimizer in self.run.scope.optimizers():
            for parameter in parameters_of(optimizer):
                row, part = table.row(parameter), local(parameter)
                if row is None or not parameter.requires_grad or not part.is_floating_point():
                    continue
                record = table.records[row]
                is_flat = record.placement.layout is Layout.SHARD and part is parameter
                # A forward of an embedding with a largest norm rescales its rows.
                if (
                    part.numel()
                    and part.is_contiguous()
                    and not is_flat
                    and "Embedding" not in record.module_type
                ):
                    found.append((record.name, row, part))
        found = [
            one
            for one in found[:: -(-len(found) // MAX_PARAMETERS) or 1]
            if one[2].device == found[0][2].device
        ]
        return [
            (name, row, part.numel(), _spread(part.numel()).to(part.device, non_blocking=True))
            for name, row, part in found
        ]


def _spread(size: int) -> Tensor:
    """Return ``[VALUES]`` places, evenly over a tensor of ``size`` elements."""
    return torch.linspace(0, size - 1, VALUES, dtype=torch.float64).long()


def _comparison(before_PW: Tensor, after_PW: Tensor, now_PW: Tensor) -> Tensor:
    """Return per parameter what :func:`_described` reads: ``[P, 8]``."""
    update, change = after_PW - before_PW, now_PW - after_PW
    is_changed = change != 0
    size = now_PW.abs()
    factor = (now_PW * after_PW).sum(1) / (after_PW * after_PW).sum(1).clamp_min(1e-30)
    return torch.stack(
        (
            is_changed.sum(1).to(now_PW.dtype),
            (change * update).sum(1),
            (update * update).sum(1),
            (change * change).sum(1),
            size.masked_fill(~is_changed, torch.inf).amin(1),
            size.masked_fill(~is_changed, 0.0).amax(1),
            (now_PW - factor[:, None] * after_PW).abs().amax(1),
            after_PW.abs().amax(1),
        ),
        dim=1,
    )


def _described(table_PK: NDArray[np.float64], names: Sequence[str]) -> dict[str, object] | None:
    """Return the facts of a change, None where every change is of a kind that loops make on purpose."""
    changed, cu, uu, cc, low, high, residual, largest = table_PK.T
    is_constant = (high - low) <= 1e-6 * high
    is_rescaled = residual <= TOLERANCE * largest
    rows = np.flatnonzero((changed > 0) & ~is_constant & ~is_rescaled)
    if not len(rows):
        return None
    order = rows[np.argsort(-cc[rows])]
    moved = float(uu[rows].sum())
    return {
        "parameters": [names[row] for row in order[:NAMED]],
        "count": len(rows),
        "reverted": -float(cu[rows].sum()) / moved if moved > 0 else 0.0,
    }
