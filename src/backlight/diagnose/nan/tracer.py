"""Hunts the first non-finite value that matters: what ``backlight nan`` observes.

What matters is a loss, a gradient that an optimizer would use, or a parameter. An infinity that is
born and gone again, as in a mask, is counted but no finding; neither is a step that a gradient
scaler skips while it looks for its scale.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from backlight.capture.expected_parameters import candidates, named_roots
from backlight.capture.hub import HUB, Listener
from backlight.capture.module_calls import ModuleCalls, module_names
from backlight.diagnose.nan.origin import NanOrigin, describe, find_origin
from backlight.diagnose.nan.value_tracker import NonFiniteRecord, ValueTracker, is_non_finite, storage_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PATIENCE = 10
"""Steps in a row that a scaler may skip before that is no longer a search for its scale."""


class NanTracer(Listener):
    """Observes a training until a non-finite value matters; a context manager around the script.

    Parameters
    ----------
    end:
        Called when the answer is there or ``steps`` are over; expected to raise what ends the script.
    steps:
        Optimizer steps to observe at most; None for all.
    """

    def __init__(self, end: Callable[[], None], steps: int | None = None) -> None:
        self._end = end
        self._limit = steps
        self._calls = ModuleCalls()
        self._mode = ValueTracker(self._calls, self.dropped)
        self._exit = contextlib.ExitStack()
        self._stepped = False
        self._scaled: tuple[int, bool] | None = None
        self._scaling = False
        self._loss_bad: NonFiniteRecord | None = None
        self._pending: NanOrigin | None = None
        self._skipped = 0
        self.step = 0
        self.backwards = 0
        self.skipped_steps = 0
        self.passing: dict[str, int] = {}
        self.found: NanOrigin | None = None
        self.notes: list[str] = []

    @property
    def operations(self) -> int:
        """Operations looked at so far."""
        return self._mode.operations

    def __enter__(self) -> NanTracer:
        """Begin to observe."""
        HUB.add(self)
        self._exit.enter_context(self._calls)
        self._exit.enter_context(self._mode)
        return self

    def __exit__(self, *_: object) -> None:
        """Take everything off; a value that was born and never reached a backward is told at least."""
        self._mode.paused = True
        self._exit.close()
        HUB.remove(self)
        if self.found is None:
            self.found = self._pending or self._never_used()
        self._count_passing()
        self._mode.forget()

    def dropped(self, error: Exception) -> None:
        """Say that observing ended early."""
        text = f"observing stopped after {type(error).__name__}: {error}"
        self.notes.append(f"{text}; what follows is not known")

    @contextlib.contextmanager
    def _unwatched(self) -> Any:
        before, self._mode.paused = self._mode.paused, True
        try:
            yield
        finally:
            self._mode.paused = before

    # Events

    def scaled(self, loss: Tensor, result: Tensor) -> None:
        """A scaler multiplies the loss: what it makes infinite is its own business."""
        with self._unwatched():
            self._scaling = True
            self._scaled = (id(result), is_non_finite(loss))

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Look at the loss."""
        if self._stepped or (self.backwards and not HUB.optimizers.alive()):
            self._next_step()
        with self._unwatched():
            self.backwards += 1
            for root in roots:
                scaled = self._scaled
                bad = scaled[1] if scaled is not None and scaled[0] == id(root) else is_non_finite(root)
                if bad and self._loss_bad is None:
                    self._loss_bad = self._mode.record_of(root)
                    if self._loss_bad is None:
                        self.notes.append("the loss was made where operations are not seen (another thread)")
            self._scaled = None
        self._mode.phase = "backward"

    def backward_end(self) -> None:
        """Look at the gradients; a backward that failed leaves what the loss told."""
        self._mode.phase = "forward"
        with self._unwatched():
            named = self._parameters()
            bad = [
                (record, name)
                for name, p in named
                if p.grad is not None and (record := self._mode.record_of(p.grad)) is not None
            ]
            lost = [name for name, p in named if p.grad is not None and is_non_finite(p.grad)]
            symptoms = [self._loss_bad] if self._loss_bad is not None else [record for record, _ in bad]
            origin = find_origin(symptoms)
            if origin is None:
                if not lost:
                    return
                # Nothing that was seen here made it so: a reduction brings it from another rank.
                origin = self._mode.from_other_rank(dict(named)[lost[0]])
            symptom = "loss" if self._loss_bad is not None else "gradients"
            found = self._described(origin, symptom)
            found.parameters = [name for _, name in sorted(bad, key=lambda pair: pair[0].index)]
            # What a reduction over ranks wrote has no record.
            found.parameters += [name for name in lost if name not in found.parameters]
            self._pending = self._pending or found
        if sys.exception() is None and (not self._scaling or symptom == "loss"):
            self._conclude()

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """Let go of what a skipped step explains."""
        if stepped:
            self._skipped = 0
        elif self._pending is not None:
            self._let_go()

    def _let_go(self) -> None:
        """Take the step for one that the scaler skips."""
        self._skipped += 1
        self.skipped_steps += 1
        self._stepped = True
        if self._skipped >= PATIENCE and self._pending is not None:
            text = f"the gradient scaler has skipped {self._skipped} steps in a row for it"
            self._pending.notes.append(text)
            self._conclude()
        self._pending = None
        self._mode.forget()

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """What follows belongs to the optimizer."""
        if self._pending is not None:
            skips = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
            if skips is not None and float(skips):
                self._let_go()
            else:
                self._conclude()
        self._mode.phase = "forward" if has_closure else "optimizer"

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameters that were just changed."""
        self._mode.phase = "forward"
        self._stepped = True
        with self._unwatched():
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            named = [(name, p) for name, p in self._parameters() if id(p) in held]
            bad = [(record, name) for name, p in named if (record := self._mode.record_of(p)) is not None]
            origin = find_origin([record for record, _ in bad])
            if origin is not None:
                self._pending = self._described(origin, "parameters")
                self._pending.parameters = [name for _, name in sorted(bad, key=lambda pair: pair[0].index)]
        if self._pending is not None:
            self._conclude()
        self._count_passing()
        self._mode.clear()

    def _next_step(self) -> None:
        self._stepped = False
        self.step += 1
        self._loss_bad = None
        if self._limit is not None and self.step >= self._limit:
            self._end()

    # The answer

    def _conclude(self) -> None:
        self.found, self._pending = self._pending, None
        self._mode.paused = True
        self._end()

    def _parameters(self) -> list[tuple[str, Tensor]]:
        HUB.seen.roots()
        roots = named_roots(HUB.seen)
        if not roots:
            HUB.seen.scan()
            roots = named_roots(HUB.seen)
        return [(c.name, c.parameter) for c in candidates(roots)]

    def _described(self, origin: NonFiniteRecord, symptom: str) -> NanOrigin:
        names = module_names(named_roots(HUB.seen))
        parameters = {storage_of(p): name for name, p in self._parameters()}
        return describe(origin, self._mode.records, self.step, symptom, names, parameters)

    def _never_used(self) -> NanOrigin | None:
        born = [r for r in self._mode.records if r.kind == "born" and r.nan]
        if not born:
            return None
        found = self._described(born[0], "nothing")
        found.notes.append("no backward followed: the script ended, or left the value out")
        return found

    def _count_passing(self) -> None:
        for record in self._mode.records:
            if record.kind == "born" and (self.found is None or str(record.line) != str(self.found.line)):
                place = f"{record.operation} at {record.line}"
                self.passing[place] = self.passing.get(place, 0) + 1
