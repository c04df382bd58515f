"""The step's path: takes what the tracker finds, starts the measurements, hands them over.

Nothing here waits for a device, reads a number or touches a file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.hub import HUB
from backlight.capture.parameters import local
from backlight.capture.steps import StepSummary
from backlight.records import Layout
from backlight.session.step_record import Draft, Part

if TYPE_CHECKING:
    from backlight.capture.scope import Scope
    from backlight.monitors.grokking.instrument.geometry import Geometry
    from backlight.monitors.spectra.instrument.replicates import Replicating
    from backlight.session.probes import Active, Plan
    from backlight.session.sampling import Cadence

QUEUE = 512
"""Drafts that may wait for a slow disk before the oldest is dropped."""

TWICE = 2
"""Steps in a row with gradients and without a backward, from which on that is said."""

NO_BACKWARD = (
    "gradients were there at the step, but no backward pass was seen: they came from torch.autograd.grad, "
    "torch.func, or a backward inside a compiled function; loss and time of backward are not recorded"
)
"""What is said where gradients come by a way that has no hooks."""


class Recorder:
    """Turns tracker calls into drafts; implements :class:`backlight.capture.steps.StepSink`.

    Parameters
    ----------
    scope, plan, cadence:
        What is watched, what is measured, and at which steps.
    notice:
        Called as ``notice(kind, payload, step)`` for events.
    at_step:
        Called with the number of each step when it opens, recorded or not.
    """

    def __init__(
        self,
        scope: Scope,
        plan: Plan,
        cadence: Cadence,
        notice: Callable[[str, dict[str, Any], int | None], None],
        at_step: Callable[[int], None] = lambda _step: None,
    ) -> None:
        self._scope = scope
        self._plan = plan
        self._cadence = cadence
        self._notice = notice
        self._at_step = at_step
        self._draft: Draft | None = None
        self._started = time.perf_counter()
        self._told_by_hand = False
        self._has_gradients = False
        self._without_backward = 0
        self._told_missing: set[int] = set()
        self._sampled: list[int] = []
        self._updating: list[Active] = []
        self._recorded = 0
        self._step = 0
        self._spent = 0.0
        self.queue: deque[Draft] = deque()
        self.user: deque[tuple[int, dict[str, Any]]] = deque()
        self.dropped = 0
        self.geometry: Geometry | None = None
        self.replicating: Replicating | None = None
        self.spent: Callable[[], float] = lambda: 0.0

    def step_opens(self, index: int) -> bool:
        """Decide about a step by the cadence."""
        self._step = index
        self._draft = None
        self._at_step(index)
        spacing = self._cadence.review(index, self.spent(), time.perf_counter() - self._started)
        if spacing is not None:
            reason = "the budget of time for measuring"
            self._notice("cadence", {"every": spacing, "reason": reason}, index)
        caught = self.replicating is not None and self.replicating.opens(index)
        measured = self.geometry is not None and self.geometry.wants(index)
        return self._cadence.wants(index) or measured or caught

    def _current(self) -> Draft:
        records = self._scope.table.records
        if self._draft is None:
            self._draft = Draft(self._step, records)
        elif len(self._draft.records) != len(records):
            # The table changed inside the step: what was measured by the old one is let go.
            self._draft = Draft(self._step, records, scalars=self._draft.scalars)
        return self._draft

    def parameters_changed(self) -> None:
        """Say so, unless this is the first table."""
        if self._step or self._draft is not None:
            count = len(self._scope.table.records)
            self._notice("parameters_changed", {"parameters": count}, self._step)

    def _measure(
        self, probes: Sequence[Active], parameters: Sequence[torch.Tensor], scale: Any, part: int = 0
    ) -> None:
        rows, grads, moved = [], [], False
        table = self._scope.table
        for parameter in parameters:
            row = table.row(parameter)
            if row is not None:
                grad = parameter.grad
                rows.append(row)
                grads.append(None if grad is None else local(grad))
                if grad is not None and grads[-1] is not grad:
                    moved = table.place_gradient(row, grad) or moved
        draft = self._current()
        if moved:
            draft.records = table.records
            self._tell_partial()
        for active in probes:
            pending = active.measuring.measure(grads, scale, draft.transfer)
            if not active.probe.series:
                draft.scalars.update(pending)
                continue
            draft.parts.append(Part(active.probe.series, rows, pending, part))

    def collect(
        self, parameters: Sequence[torch.Tensor], scale: torch.Tensor | float | None, moment: str
    ) -> None:
        """Measure gradients as backward left them."""
        probes = self._plan.gradients
        if self._cadence.in_detail(self._step):
            probes = (*probes, *self._plan.detailed)
        self._measure(probes, parameters, scale)
        if not HUB.backward_depth:
            self._has_gradients = self._has_gradients or any(p.grad is not None for p in parameters)
        if self.geometry is not None:
            self.geometry.collect(self._step, self._scope.table, parameters, scale)
        if self.replicating is not None:
            self.replicating.collect()

    def backward_ended(self, parameters: Sequence[torch.Tensor], index: int) -> None:
        """Measure the gradients accumulated so far, as part ``index + 1`` of the step."""
        self._measure(self._plan.gradients[:1], parameters, None, index + 1)

    def update_begins(self, parameters: Sequence[torch.Tensor]) -> None:
        """Keep a sample of the weights, at the steps at which updates are measured."""
        if self.replicating is not None:
            self.replicating.update_begins()
        detail = self._cadence.in_detail(self._step)
        self._updating = [a for a in self._plan.weights if detail or self._recorded % a.spacing == 0]
        if self._updating:
            rows = [(row, p) for p in parameters if (row := self._scope.table.row(p)) is not None]
            self._sampled = [row for row, _ in rows]
            tensors = [p for _, p in rows]
            for active in self._updating:
                active.measuring.before(tensors)

    def update_ends(self) -> None:
        """Compare the sample with the weights after the step."""
        draft = self._current()
        for active in self._updating:
            pending = active.measuring.after(draft.transfer)
            if pending is not None:
                draft.parts.append(Part(active.probe.series, self._sampled, pending))

    def step_closes(self, summary: StepSummary) -> None:
        """Complete the draft and hand it to the thread that writes."""
        if self.geometry is not None:
            self.geometry.close(self._step)
        if self.replicating is not None:
            self.replicating.close(summary)
        draft = self._current()
        scalars = draft.scalars
        scalars["time"] = time.time()
        scalars["backwards"] = summary.backwards
        scalars["backwards_seen"] = summary.backwards_seen
        spent = self.spent()
        scalars["cost"] = spent - self._spent
        self._spent = spent
        if summary.loss is not None:
            scalars["loss"] = summary.loss
        if summary.batch is not None:
            scalars["batch"] = summary.batch
        scalars.update(summary.rates)
        if summary.changed_by_hand:
            scalars["clip/by_hand"] = summary.changed_by_hand
            self._tell_by_hand(summary.changed_by_hand)
        draft.clips = summary.clips
        draft.scale = summary.scale
        draft.skipped = summary.skipped
        for active in self._plan.steps:
            scalars.update(active.measuring.measure(summary))
        draft.depart()
        self._tell_missing(summary.without_gradient)
        self._tell_without_backward(summary.backwards)
        if len(self.queue) >= QUEUE:
            self.queue.popleft()
            self.dropped += 1
        self.queue.append(draft)
        self._recorded += 1
        self._draft = None

    def _tell_without_backward(self, backwards: int) -> None:
        # The first of all steps may have had its backward before anybody watched.
        alone, self._has_gradients = self._has_gradients and not backwards, False
        if self._without_backward < TWICE:
            self._without_backward = self._without_backward + 1 if alone else 0
            if self._without_backward == TWICE:
                self._notice("unmeasured", {"what": "loss and backward", "reason": NO_BACKWARD}, self._step)

    def _tell_by_hand(self, count: int) -> None:
        if not self._told_by_hand:
            self._told_by_hand = True
            self._notice("clip_by_hand", {"parameters": count}, self._step)

    def _tell_partial(self) -> None:
        partial = [
            record.name
            for record in self._scope.table.records
            if record.gradient is not None and record.gradient.layout is Layout.PARTIAL
        ]
        if partial:
            reason = (
                "each rank holds a partial sum of these gradients, which nothing has reduced when the "
                "optimizer begins: the norm of their sum cannot be had without a collective"
            )
            what = f"gradients of {', '.join(partial)} over all ranks"
            self._notice("unmeasured", {"what": what, "reason": reason}, self._step)

    def _tell_missing(self, parameters: Sequence[torch.Tensor]) -> None:
        table = self._scope.table
        rows = [row for p in parameters if (row := table.row(p)) is not None and table.records[row].numel]
        fresh = [row for row in rows if row not in self._told_missing and table.records[row].requires_grad]
        if fresh:
            self._told_missing.update(fresh)
            names = [table.records[row].name for row in fresh]
            self._notice("no_grad_at_step", {"parameters": names}, self._step)
