"""Traces the first non-finite value that matters back to its origin: what ``backlight nan`` observes.

What matters is a loss, a gradient that an optimizer would use, or a parameter. An infinity that vanishes
again, as in a mask, is counted but not reported; neither is a step that a gradient scaler skips while it
searches for its scale.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backlight.capture.calls import module_names
from backlight.capture.hub import HUB
from backlight.capture.parameters import candidates, named_roots
from backlight.diagnose.nan.value_tracker import NonFiniteRecord, ValueTracker, is_non_finite, storage_of
from backlight.diagnose.script_observer import ScriptObserver

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from backlight.user_code import SourceLine

MAX_SKIPPED_STEPS = 10
"""Consecutive steps that a gradient scaler may skip while it searches for its scale."""


@dataclass
class NanOrigin:
    """The first operation with finite inputs and a non-finite output, and what followed."""

    record: NonFiniteRecord
    step: int  # from 0
    symptom: str  # where it was detected: loss, gradients, parameters
    module: str
    parameter: str  # where the value was one before
    constant: SourceLine | None  # line of a deliberate infinity from which the value was computed
    modules: list[str]  # through which it then passed, in order
    left_out: NonFiniteRecord | None = None  # of it and what it led to: what has no part in the loss
    parameters: list[str] = field(default_factory=list)  # with non-finite gradients or values, in order
    notes: list[str] = field(default_factory=list)

    @property
    def value(self) -> str:
        """``NaN`` or ``infinity``."""
        return "NaN" if self.record.nan else "infinity"

    @property
    def replaced_by(self) -> str:
        """Operation that leaves the value out of the forward; empty where none is known."""
        return "" if self.left_out is None else self.left_out.replaced_by

    @property
    def replaced_at(self) -> SourceLine | None:
        """Line of :attr:`replaced_by`."""
        return None if self.left_out is None else self.left_out.replaced_at

    @property
    def is_zero_gradient(self) -> bool:
        """Whether it has no part in the loss, so that its gradient is 0, times an infinite derivative."""
        return self.left_out is not None

    @property
    def is_input(self) -> bool:
        """Whether it entered the training from outside, so that the operation is the first to use it."""
        return self.record.kind == "input"


def find_ancestors(symptoms: Iterable[NonFiniteRecord]) -> list[NonFiniteRecord]:
    """Return the records that led to ``symptoms``, themselves included, in order of time."""
    by_id: dict[int, NonFiniteRecord] = {}
    stack = list(symptoms)
    while stack:
        record = stack.pop()
        if id(record) not in by_id:
            by_id[id(record)] = record
            stack.extend(record.parents)
    return sorted(by_id.values(), key=lambda record: record.index)


def find_origin(symptoms: Iterable[NonFiniteRecord]) -> NonFiniteRecord | None:
    """Return the first origin behind ``symptoms``; else the first input, else the first constant."""
    ancestors = find_ancestors(symptoms)
    order = ("origin", "input", "constant", "spread")
    return min(ancestors, key=lambda record: order.index(record.kind), default=None)


def describe_origin(
    origin: NonFiniteRecord,
    records: Sequence[NonFiniteRecord],
    step: int,
    symptom: str,
    modules: Mapping[int, str],
    parameters: Mapping[int, str],
) -> NanOrigin:
    """Return a record as an answer; ``modules`` holds names by ``id``, ``parameters`` by storage."""
    passed: list[str] = []
    left_out = origin if _is_left_out(origin) else None
    descendants = {id(origin)}
    module = modules.get(origin.module, "")
    for record in records:
        if any(id(parent) in descendants for parent in record.parents):
            descendants.add(id(record))
            left_out = left_out or (record if _is_left_out(record) else None)
            name = modules.get(record.module, "")
            if record.phase == origin.phase and name and name != module and name not in passed:
                passed.append(name)
    constants = [r for r in find_ancestors([origin]) if r.kind == "constant" and r is not origin]
    constant = constants[0].line if constants else None
    parameter = parameters.get(origin.storage, "")
    left_out = left_out if symptom == "gradients" else None
    return NanOrigin(origin, step, symptom, module, parameter, constant, passed, left_out)


def _is_left_out(record: NonFiniteRecord) -> bool:
    return record.is_zero_gradient or bool(record.replaced_by)


class NanTracer(ScriptObserver):
    """Observes a script until a non-finite value matters; a context manager around it."""

    def __init__(self, end: Callable[[], None], max_steps: int | None = None) -> None:
        super().__init__(max_steps, end)
        self._tracker = ValueTracker(self._calls, self.dropped)
        self._scaled: tuple[int, bool] | None = None
        self._scaling = False
        self._loss_record: NonFiniteRecord | None = None
        self._pending: NanOrigin | None = None
        self._consecutive_skips = 0
        self.skipped_steps = 0  # by a gradient scaler
        # Non-finite values that reached nothing that matters, by operation and line.
        self.vanished = Counter[str]()
        self.origin: NanOrigin | None = None

    @property
    def operations(self) -> int:
        """Number of operations checked so far."""
        return self._tracker.operations

    @property
    def observed_steps(self) -> int:
        """Number of steps observed so far, the open one included."""
        return self.steps + (not self._is_over())

    def _record(self) -> Iterator[Any]:
        yield self._tracker

    def _complete(self) -> None:
        if self.origin is None:
            self.origin = self._pending or self._unused()
        self._count_vanished()
        self._tracker.forget()

    def __exit__(self, *error: object) -> None:
        """Remove everything; report a value even if it never reached a backward pass."""
        self._tracker.paused = True
        super().__exit__(*error)

    # Events

    def scaled(self, scaler: Any, loss: Tensor, result: Tensor) -> None:
        """A scaler multiplies the loss: what overflows there is its own business."""
        with self._tracker.pause():
            self._scaling = True
            self._scaled = (id(result), is_non_finite(loss))

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Check the loss."""
        if self._begins_step():
            self._loss_record = None
            if self._is_over():
                self._end()
        with self._tracker.pause():
            self.backwards += 1
            for root in roots:
                scaled = self._scaled
                bad = scaled[1] if scaled is not None and scaled[0] == id(root) else is_non_finite(root)
                if bad and self._loss_record is None:
                    self._loss_record = self._tracker.record_of(root)
                    if self._loss_record is None:
                        self.notes.append("the loss was computed in another thread, which is not observed")
            self._scaled = None
        self._tracker.phase = "backward"

    def backward_end(self) -> None:
        """Check the gradients; after a backward that failed only the loss counts."""
        self._tracker.phase = "forward"
        with self._tracker.pause():
            named = [(name, p) for name, p in self._parameters() if p.grad is not None]
            bad = self._records((name, p.grad) for name, p in named if p.grad is not None)
            lost = [name for name, p in named if p.grad is not None and is_non_finite(p.grad)]
            origin = find_origin([self._loss_record] if self._loss_record is not None else bad.values())
            if origin is None:
                if not lost:
                    return
                # No operation of this process made it so: a reduction brings it from another rank.
                origin = self._tracker.from_other_rank(dict(named)[lost[0]])
            symptom = "loss" if self._loss_record is not None else "gradients"
            described = self._describe(origin, symptom)
            # What a reduction over ranks wrote has no record.
            described.parameters = [*bad, *(name for name in lost if name not in bad)]
            self._pending = self._pending or described
        if sys.exception() is None and (not self._scaling or symptom == "loss"):
            self._conclude()

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """Forget what a skipped step explains."""
        if stepped:
            self._consecutive_skips = 0
        elif self._pending is not None:
            self._skip_step()

    def _skip_step(self) -> None:
        self._consecutive_skips += 1
        self.skipped_steps += 1
        self._stepped = True
        if self._consecutive_skips >= MAX_SKIPPED_STEPS and self._pending is not None:
            text = f"the gradient scaler has skipped {self._consecutive_skips} steps in a row for it"
            self._pending.notes.append(text)
            self._conclude()
        self._pending = None
        self._tracker.forget()

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Report what the optimizer would use; later operations belong to it."""
        if self._pending is not None:
            found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
            if found_inf is not None and float(found_inf):
                self._skip_step()
            else:
                self._conclude()
        self._tracker.phase = "forward" if has_closure else "optimizer"

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the parameters that were just changed."""
        self._tracker.phase = "forward"
        self._stepped = True
        with self._tracker.pause():
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            bad = self._records((name, p) for name, p in self._parameters() if id(p) in stepped)
            origin = find_origin(bad.values())
            if origin is not None:
                self._pending = self._describe(origin, "parameters")
                self._pending.parameters = list(bad)
        if self._pending is not None:
            self._conclude()
        self._count_vanished()
        self._tracker.clear()

    # The answer

    def _conclude(self) -> None:
        self.origin, self._pending = self._pending, None
        self._tracker.paused = True
        self._end()

    def _parameters(self) -> list[tuple[str, Tensor]]:
        HUB.seen.roots()
        roots = named_roots(HUB.seen)
        if not roots:
            HUB.seen.scan()
            roots = named_roots(HUB.seen)
        return [(c.name, c.parameter) for c in candidates(roots)]

    def _records(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, NonFiniteRecord]:
        """Return the records of the non-finite tensors by name, in order of time."""
        records = {name: record for name, t in named if (record := self._tracker.record_of(t)) is not None}
        return dict(sorted(records.items(), key=lambda pair: pair[1].index))

    def _describe(self, origin: NonFiniteRecord, symptom: str) -> NanOrigin:
        names = module_names(named_roots(HUB.seen))
        parameters = {storage_of(p): name for name, p in self._parameters()}
        return describe_origin(origin, self._tracker.records, self.steps, symptom, names, parameters)

    def _unused(self) -> NanOrigin | None:
        origins = [r for r in self._tracker.records if r.kind == "origin" and r.nan]
        if not origins:
            return None
        described = self._describe(origins[0], "nothing")
        described.notes.append("no backward followed: the script ended, or does not use the value")
        return described

    def _count_vanished(self) -> None:
        for record in self._tracker.records:
            if record.kind == "origin" and (
                self.origin is None or str(record.line) != str(self.origin.record.line)
            ):
                self.vanished[f"{record.operation} at {record.line}"] += 1
