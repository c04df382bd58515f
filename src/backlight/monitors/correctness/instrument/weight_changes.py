"""Whether weights change only in the optimizer's step: a sample after it, at forward and at backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.samples import Snapshot, sampled, thinned
from backlight.monitors.correctness.model.facts import Names
from backlight.monitors.correctness.rules import weight_changes as facts
from backlight.records import Layout

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable

MAX_PARAMETERS = 12
"""Parameters that are followed, evenly over those that the optimizers train."""

VALUES = 64
"""Weights of a parameter that are compared, at least."""

UNCHANGED = 0.5
"""Share of the weights with a gradient that a step leaves as they were, from which on that is reported."""

INEFFECTIVE_STEPS = 5
"""Steps in a row without any change from which on they are reported."""

TOLERANCE = 1e-3
"""Relative deviation from a common factor up to which weights count as rescaled."""


@dataclass(frozen=True)
class _Followed:
    """A parameter that is followed: its row in the table, and its size."""

    name: str
    row: int
    size: int
    device: torch.device


class WeightChanges(Check):
    """Compares samples of the weights before and after a step, at the next forward and at its backward.

    Weights that were clipped to a constant, set to zero or rescaled as a whole are not reported as changed.
    """

    name = "weight_changes"

    def _start(self) -> None:
        self._table: ParameterTable | None = None
        self._followed: list[_Followed] = []
        self._before: Snapshot | None = None  # the step that is in progress, or the last one
        self._after: Snapshot | None = None  # that step; None once compared
        self._forward: Snapshot | None = None
        self._has_gradient: list[bool] = []  # of those that are followed, as the optimizer began
        self._step = 0
        self._comparisons = 0
        self._steps = 0
        self._ineffective: list[facts.StepWithoutEffect] = []  # steps in a row that changed nothing

    def forget(self) -> None:
        """Drop the weights of the last step."""
        self._before = self._after = self._forward = None

    # Events

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Read the weights before they are updated."""
        self._after = self._forward = None
        is_plain = not has_closure and not HUB.backward_depth and self.run.scope.holds(optimizer)
        self._before = self._read() if self.due and is_plain else None
        if self._before is not None:
            tensors = [self._tensor(followed) for followed in self._followed]
            self._has_gradient = [p is not None and p.grad is not None for p in tensors]
        self._step = self.step

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the weights that the optimizer leaves."""
        self._after = self._read() if self._before is not None else None
        if self._before is not None and self._after is not None:
            self._compare_over_step(optimizer, self._before, self._after)

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare with the last step, and read the weights of this forward."""
        if torch.is_grad_enabled() and not HUB.backward_depth and not is_transforming():
            now = self._compare_with_step()
            if self._forward is None and self.due:
                self._forward = now or self._read()

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Compare with the forward."""
        now = self._compare_with_step()  # where no forward was reported
        forward, self._forward, followed = self._forward, None, self._followed
        now = (now or self._read()) if forward is not None else None
        if forward is None or now is None or self._followed is not followed:
            return
        step, names = self.step, [followed.name for followed in self._followed]

        def report() -> None:
            pairs = zip(names, _finite(forward), _finite(now), strict=True)
            changed = [name for name, before, after in pairs if (before != after).any()]
            if changed:
                self.report(facts.ChangedBeforeBackward(step, Names.of(changed)))

        self.when_known(report)

    # Comparison

    def _compare_over_step(self, optimizer: torch.optim.Optimizer, before: Snapshot, after: Snapshot) -> None:
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
        rows, samples = [], []
        for number, followed in enumerate(self._followed):
            parameter = self._tensor(followed)
            gradient = None if parameter is None or parameter.grad is None else local(parameter.grad)
            if gradient is None or id(parameter) not in rates or gradient.numel() != followed.size:
                continue
            if gradient.layout is torch.strided and gradient.is_contiguous():
                samples.append(sampled(gradient, VALUES))
                dtype = str(gradient.dtype).removeprefix("torch.")
                rows.append(_Row(number, followed.name, rates[id(parameter)], dtype))
        if not rows:
            return
        gradients = self.snapshot(samples)
        self._steps += 1
        step, steps = self._step, self._steps

        def report() -> None:
            fact = _unchanged(rows, _finite(before), _finite(after), gradients.arrays, step, steps)
            if isinstance(fact, facts.StepWithoutEffect):
                self._ineffective.append(fact)
                if len(self._ineffective) < INEFFECTIVE_STEPS:
                    return  # the optimizer may collect gradients
                is_first = len(self._ineffective) == INEFFECTIVE_STEPS
                for ineffective in self._ineffective[0 if is_first else -1 :]:
                    self.report(ineffective)
                return
            self._ineffective = []
            if fact is not None:
                self.report(fact)

        self.when_known(report)

    def _tensor(self, followed: _Followed) -> Tensor | None:
        return None if self._table is None else self._table.tensor(followed.row)

    def _compare_with_step(self) -> Snapshot | None:
        """Compare the weights with those that the last step left; return them, if they were read."""
        before, after, followed = self._before, self._after, self._followed
        self._before = self._after = None
        now = self._read() if after is not None else None
        if before is None or after is None or now is None or self._followed is not followed:
            return now
        self._comparisons += 1
        step, comparisons = self._step, self._comparisons
        # Weights without a gradient may be those of an average that the script keeps.
        trained = self._has_gradient

        def report() -> None:
            pairs = zip(followed, trained, _finite(before), _finite(after), _finite(now), strict=True)
            changes = [(parameter.name, *weights) for parameter, is_trained, *weights in pairs if is_trained]
            if (fact := _described(changes, step, comparisons)) is not None:
                self.report(fact)

        self.when_known(report)
        return now

    # Sample

    def _read(self) -> Snapshot | None:
        """Return samples of the weights, None where they cannot be read."""
        if is_capturing_graph() or is_transforming():
            return None
        if self._table is not self.run.scope.table:
            self._table = self.run.scope.table
            self._followed = self._chosen()
            self.forget()
        samples = []
        for followed in self._followed:
            parameter = self._table.tensor(followed.row)
            part = None if parameter is None else local(parameter)
            if part is None or part.numel() != followed.size or part.device != followed.device:
                return None
            samples.append(sampled(part, VALUES))
        return self.snapshot(samples) if samples else None

    def _chosen(self) -> list[_Followed]:
        """Return what is followed: contiguous weights on one device, none that a flat parameter holds."""
        table = self.run.scope.table
        candidates = []
        for optimizer in self.run.scope.optimizers():
            for parameter in parameters_of(optimizer):
                row, part = table.row(parameter), local(parameter)
                if row is None or not parameter.requires_grad or not part.is_floating_point():
                    continue
                record = table.records[row]
                is_flat = record.placement.layout is Layout.SHARD and part is parameter
                # A forward of an embedding with a largest norm rescales its rows.
                is_plain = part.is_contiguous() and not is_flat and "Embedding" not in record.module_type
                if part.numel() and is_plain:
                    candidates.append(_Followed(record.name, row, part.numel(), part.device))
        chosen = thinned(candidates, MAX_PARAMETERS)
        return [followed for followed in chosen if followed.device == chosen[0].device]


def _finite(moment: Snapshot) -> list[NDArray[np.float64]]:
    """Return the weights of a moment; NaN is not equal to itself, so what is not finite counts as 0."""
    values = [array.astype(np.float64) for array in moment.arrays]
    return [np.nan_to_num(array, copy=False, nan=0.0, posinf=0.0, neginf=0.0) for array in values]


def _described(
    changes: Sequence[tuple[Any, ...]], step: int, comparisons: int
) -> facts.ChangedAfterStep | None:
    """Return the fact of a change, None where every change is of a kind that loops make on purpose.

    ``changes`` are name, weights before the step, after it, and now.
    """
    moves = []
    for name, before, after, now in changes:
        update, change, size = after - before, now - after, np.abs(now)
        written = size[change != 0]
        if not len(written):
            continue
        factor = (now @ after) / max(float(after @ after), 1e-30)
        is_constant = np.ptp(written) <= 1e-6 * written.max()
        is_rescaled = np.abs(now - factor * after).max() <= TOLERANCE * np.abs(after).max()
        if not is_constant and not is_rescaled:
            # Means: each parameter counts the same.
            means = [float(np.mean(v)) for v in (change * change, change * update, update * update)]
            moves.append((name, *means))
    if not moves:
        return None
    updated = sum(update_square for *_, update_square in moves)
    names = [name for name, *_ in sorted(moves, key=lambda move: -move[1])]
    reverted = -sum(product for _, _, product, _ in moves) / updated if updated > 0 else 0.0
    return facts.ChangedAfterStep(step, Names.of(names), reverted, comparisons)


class _Row(NamedTuple):
    """A parameter whose gradient an optimizer used, by its number among those that are followed."""

    number: int
    name: str
    rate: float
    dtype: str


def _unchanged(
    rows: Sequence[_Row],
    before: Sequence[NDArray[np.float64]],
    after: Sequence[NDArray[np.float64]],
    gradients: Sequence[NDArray[np.generic]],
    step: int,
    comparisons: int,
) -> facts.RoundedStep | facts.StepWithoutEffect | None:
    """Return the fact of a step that left most weights as they were, None for one that did not.

    A step is at least the rate times the smaller of 1 and the gradient, whatever the optimizer.
    """
    used_P, same_P, size_P, gradient_P = (np.zeros(len(rows)) for _ in range(4))
    for p, row in enumerate(rows):
        old, new, values = before[row.number], after[row.number], gradients[p].astype(np.float64)
        # What is 0 before and after may be a weight that is not finite.
        used = (values != 0) & np.isfinite(values) & ((old != 0) | (new != 0))
        # Means: each parameter counts the same.
        used_P[p], same_P[p], size_P[p] = used.mean(), (used & (old == new)).mean(), np.abs(old).mean()
        gradient_P[p] = np.sqrt(np.square(values[used]).mean()) if used.any() else 0.0
    if not used_P.sum() or same_P.sum() < UNCHANGED * used_P.sum():
        return None
    spacing_P = size_P * np.array([facts.SPACING.get(row.dtype, facts.SPACING["float32"]) for row in rows])
    rate_P = np.array([row.rate for row in rows])
    is_large_P = (rate_P * np.minimum(gradient_P, 1.0) > spacing_P) & (used_P > 0)
    has_no_effect = bool((same_P == used_P).all() and is_large_P.any())
    most = int(np.argmax(same_P))
    first = next(row.name for row, same in zip(rows, same_P, strict=True) if same)
    return (facts.StepWithoutEffect if has_no_effect else facts.RoundedStep)(
        step=step,
        parameter=first,
        share=float(same_P.sum() / used_P.sum()),
        rate=float(rate_P[most]),
        dtype=rows[most].dtype,
        size=float(size_P[most]),
        gradient=float(gradient_P[most]),
        comparisons=comparisons,
    )
