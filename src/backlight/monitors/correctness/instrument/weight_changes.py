"""Whether weights change only in the optimizer's step: a sample after it, at forward and at backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.parameters import local
from backlight.capture.seen_optimizers import parameters_of
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import NAMED, Check
from backlight.monitors.correctness.model.number_spacings import SPACING
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

INEFFECTIVE_STEPS = 5
"""Steps in a row without any change from which on they are reported."""

TOLERANCE = 1e-3
"""Relative deviation from a common factor up to which weights count as rescaled."""


class WeightChanges(Check):
    """``weights_changed``: weights differ between an optimizer's step, the next forward and its backward.

    ``weights_unchanged``: weights with a gradient are the same before and after the step, because it is
    smaller than the spacing of their type (``rounded``) or does nothing (``no_effect``). Weights that were
    clipped to a constant, set to zero or rescaled as a whole are not reported as changed.
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
        self._has_gradient = np.zeros(0, np.bool_)  # of those that are followed, as the optimizer began
        self._step = 0
        self._comparisons = 0
        self._steps = 0
        self._ineffective: list[tuple[int, dict[str, Any]]] = []  # steps in a row that changed nothing

    def forget(self) -> None:
        """Drop the weights of the last step."""
        self._before = self._after = self._forward = None

    # Events

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Read the weights before they are updated."""
        self._after = self._forward = None
        is_plain = not has_closure and not HUB.backward_depth and self.run.scope.holds(optimizer)
        self._before = self._read() if self.due and is_plain else None
        tensors = [self._tensor(row) for _, row, *_ in self._followed] if self._before is not None else []
        self._has_gradient = np.array([p is not None and p.grad is not None for p in tensors], np.bool_)
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
        # A tensor as rate, or a fused step that is skipped on the device, is not read here.
        if getattr(optimizer, "found_inf", None) is not None:
            return
        rates = {
            id(p): group["lr"]
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), float) and group["lr"] > 0
            for p in group["params"]
        }
        rows, counts = [], []
        with torch.no_grad():
            for number, (name, row, _, index) in enumerate(self._followed):
                parameter = self._tensor(row)
                gradient = None if parameter is None or parameter.grad is None else local(parameter.grad)
                if gradient is None or id(parameter) not in rates:
                    continue
                if gradient.layout is not torch.strided or not gradient.is_contiguous():
                    continue
                values = gradient.detach().reshape(-1)[index].float()
                # What is 0 before and after may be a weight that is not finite.
                used = (values != 0) & values.isfinite() & ((before[number] != 0) | (after[number] != 0))
                same = used & (before[number] == after[number])
                size = before[number].abs().mean()
                squares = values.masked_fill(~used, 0.0).square().sum()
                counts.append(torch.stack((used.sum(), same.sum(), size, squares)))
                rows.append((name, rates[id(parameter)], str(gradient.dtype).removeprefix("torch.")))
            if not counts:
                return
            known = torch.stack(counts)
        self._steps += 1
        step, steps = self._step, self._steps

        def report(known: NDArray[np.generic]) -> None:
            facts = _unchanged(known.astype(float), rows)
            if facts is not None and facts["kind"] == "no_effect":
                self._ineffective.append((step, {"comparisons": steps, **facts}))
                if len(self._ineffective) < INEFFECTIVE_STEPS:
                    return  # the optimizer may collect gradients
                is_first = len(self._ineffective) == INEFFECTIVE_STEPS
                for at, at_facts in self._ineffective[0 if is_first else -1 :]:
                    self.report("weights_unchanged", at, **at_facts)
                return
            self._ineffective = []
            if facts is not None:
                self.report("weights_unchanged", step, comparisons=steps, **facts)

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
        # Weights without a gradient may be those of an average that the script keeps.
        trained = self._has_gradient
        names = [name for (name, *_), one in zip(self._followed, trained, strict=True) if one]
        with torch.no_grad():
            table = _comparison(before, after, now)

        def report(known: NDArray[np.generic]) -> None:
            if (facts := _described(known.astype(float)[trained], names)) is not None:
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


def _unchanged(
    table_PK: NDArray[np.float64], rows: Sequence[tuple[str, float, str]]
) -> dict[str, object] | None:
    """Return the facts of a step that left most weights as they were, None for one that did not.

    A step is at least the rate times the smaller of 1 and the gradient, whatever the optimizer.
    """
    used_P, same_P, size_P, squares_P = table_PK.T
    if not used_P.sum() or same_P.sum() < UNCHANGED * used_P.sum():
        return None
    gradient_P = np.sqrt(squares_P / np.maximum(used_P, 1))
    spacing_P = size_P * np.array([SPACING.get(dtype, SPACING["float32"]) for *_, dtype in rows])
    rate_P = np.array([rate for _, rate, _ in rows])
    is_large_P = (rate_P * np.minimum(gradient_P, 1.0) > spacing_P) & (used_P > 0)
    has_no_effect = bool((same_P == used_P).all() and is_large_P.any())
    most = int(np.argmax(same_P))
    return {
        "kind": "no_effect" if has_no_effect else "rounded",
        "share": float(same_P.sum() / used_P.sum()),
        "rate": float(rate_P[most]),
        "dtype": rows[most][2],
        "size": float(size_P[most]),
        "gradient": float(gradient_P[most]),
        "parameters": [name for (name, *_), one in zip(rows, same_P > 0, strict=True) if one][:NAMED],
    }
