"""The step's path: from its events over the monitors to the queue of the writer thread.

Nothing here waits for a device, reads a number or touches a file: a record holds references, and results that
may still be on a device. Host numbers and arrays are made by the writer thread.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backlight import clock
from backlight.capture.hub import HUB
from backlight.capture.left_gradients import LeftGradients
from backlight.capture.parameters import PLAIN, local
from backlight.capture.step_summary import StepSummary
from backlight.capture.steps import StepTracker
from backlight.devices import WorkTimer
from backlight.distributed import world
from backlight.measure.transfer import AsyncCopy, Slot, TransferBatch, first_number
from backlight.monitor import Gradients
from backlight.records import Layout, ParameterRecord
from backlight.series import SERIES
from backlight.session.sampling import ProcessorTime
from backlight.session.step_scalars import MAX_QUEUED_STEPS, StepScalars
from backlight.store.format.schema import REQUIRES_GRAD

if TYPE_CHECKING:
    from backlight.capture.parameters import Scope
    from backlight.notifier import Notifier
    from backlight.session.monitor_set import MonitorSet
    from backlight.session.sampling import Sampling

MAX_QUEUED_RECORDS = 512
"""Records of a large model that may wait for a slow disk before further ones are dropped."""

MAX_QUEUED_SMALL_RECORDS, MAX_QUEUED_ROWS = 8192, 2**18
"""Records that may wait if they are small: so many rows of parameters at most, about 30 MB."""

TIMED_STEPS = 16
"""Observed steps without a record of which one is timed: reading the processor's clock is a system call."""

NO_SPAN = contextlib.nullcontext()

STEPS_WITHOUT_BACKWARD = 2
"""Steps in a row with gradients and without a backward after which that is recorded."""

NO_BACKWARD = (
    "gradients were there at the step, but no backward pass was observed: they came from torch.autograd."
    "grad, torch.func, or a backward inside a compiled function; loss and time of backward are not recorded"
)
"""Why loss and backward are not measured where gradients come by a way that has no hooks."""


REPLAYED = (
    "they ran in a replayed graph of kernels (CUDA graph), where no hook is called; loss and learning rate "
    "are recorded. To measure them, train some steps without the graph"
)
"""Why the gradients of a captured step are not measured."""


@dataclass
class Part:
    """Measurement of some rows of the parameter table by one monitor."""

    series: str
    rows: list[int]
    pending: Any
    part: int = 0


@dataclass
class StepRecord:
    """One recorded step, in progress or on its way to the store; ``number`` were recorded before it.

    ``in_detail`` is whether an alarm asked for it, so that more than usual may be measured. ``scalars`` are
    numbers, and tensors of one number, by name. ``transfer`` takes tables of numbers from a device to the
    host, all of a step in one copy.
    """

    step: int
    number: int
    parameters: tuple[ParameterRecord, ...]
    in_detail: bool = False
    scalars: dict[str, Any] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    clips: list[tuple[int, str, float]] = field(default_factory=list)
    scale: Any = None
    skipped: Any = None
    transfer: TransferBatch = field(default_factory=TransferBatch)

    def add(self, series: str, rows: list[int], pending: Any, part: int = 0) -> None:
        """Add what was measured of ``rows``, as a pending result of a per-parameter series."""
        self.parts.append(Part(series, rows, pending, part))

    def add_scalars(self, values: Mapping[str, Any]) -> None:
        """Add numbers or tensors with one element, which are read off the path; TypeError for others."""
        checked: dict[str, Any] = {}
        for name, value in values.items():
            if not hasattr(value, "numel"):
                checked[name] = float(value)
            elif value.numel() != 1:
                raise TypeError(f"{name}: expected one number, got {value.numel()}")
            else:
                checked[name] = value.detach()
        self.scalars.update(checked)

    def send(self) -> None:
        """Start the copy of everything the step has measured, tensors among the scalars included."""
        for name, value in self.scalars.items():
            if isinstance(value, torch.Tensor):
                self.scalars[name] = self._enqueued(value)
        if self.scale is not None:
            self.scale = self._enqueued(self.scale)
        if self.skipped is not None:
            self.skipped = self._enqueued(self.skipped)
        self.transfer.start()

    def _enqueued(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type == "cpu":  # another thread makes a number of it
            return value.detach().clone()
        return self.transfer.add(first_number(value))

    def ready(self) -> bool:
        """Return whether every result has arrived on the host, so that nothing would wait."""
        single = (*self.scalars.values(), self.scale, self.skipped)
        return all(part.pending.ready() for part in self.parts) and all(
            value.done() for value in single if isinstance(value, (AsyncCopy, Slot))
        )

    def arrays(self) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
        """Return float64 and int64 blobs ``[P, k]`` by series and part; unmeasured rows are 0."""
        blobs: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
        for part in self.parts:
            schema = SERIES[part.series]
            key = (part.series, part.part)
            if key not in blobs:
                count = len(self.parameters)
                blobs[key] = (
                    np.zeros((count, len(schema.floats))),
                    np.zeros((count, len(schema.integers)), dtype=np.int64),
                )
            floats, integers = part.pending.arrays()
            blobs[key][0][part.rows] = floats
            blobs[key][1][part.rows] = integers
        return blobs


def _ignore() -> None:
    pass


class StepRecorder(StepTracker):
    """Records the steps that the sampling or a monitor wants.

    ``scalars`` holds completed steps, with their records where there is one, and ``logged`` scalars of the
    user by step, for the writer thread. ``dropped_records`` counts those for which the disk was too slow,
    ``stored`` those that the writer thread has taken. ``on_backlog`` is called when a quarter of those that
    may wait for that thread do.
    """

    _scalars: StepScalars

    def __init__(
        self,
        scope: Scope,
        sampling: Sampling,
        monitors: MonitorSet,
        notifier: Notifier,
        *,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(scope, StepScalars(), per_backward=monitors.want_backwards, max_steps=max_steps)
        self._sampling, self._monitors, self._notifier = sampling, monitors, notifier
        self._is_known = False
        self._record: StepRecord | None = None
        self._time, self._device_work = ProcessorTime(), WorkTimer()
        self._device: torch.device | None = None
        monitors.account(self._device_work)
        self._step = self._recorded = 0
        self._last_recorded, self._left = -1, LeftGradients()
        self._spent_before, self._spent_until = 0.0, HUB.spent
        self._has_gradients = False
        self._without_backward = 0
        self._has_replayed = False
        self._reported_by_hand = False
        self._reported_missing: set[str] = set()
        self._trainable: dict[str, bool] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._reported_flags: set[tuple[str, bool]] = set()
        self.logged: deque[tuple[int, dict[str, Any]]] = deque()
        self.dropped_records = self.stored = 0
        self.on_backlog: Callable[[], None] = _ignore
        self._room = MAX_QUEUED_RECORDS

    @property
    def scalars(self) -> StepScalars:
        """Completed steps, with their scalars, and those of the step in progress."""
        return self._scalars

    @property
    def completed(self) -> int:
        """Number of completed steps, recorded or not."""
        return self._step

    @property
    def is_behind(self) -> bool:
        """Whether so many steps wait for the writer thread that it should not pause."""
        waiting = self._recorded - self.dropped_records - self.stored
        return waiting > self._room // 4 or len(self._scalars.queue) > MAX_QUEUED_STEPS // 4

    def _spent(self) -> float:
        """Return the seconds that the watch has taken so far; hooks of monitors run inside listeners."""
        return HUB.spent - self._spent_until + self._monitors.accounted()

    def release(self) -> None:
        """Announce the parameters of a run without a second step, and drop what is the script's."""
        self._announce_parameters()
        self._left = LeftGradients()
        self._scalars.last_norms.clear()

    def _announce_parameters(self) -> None:
        if not self._is_known and self._scope.table.records:
            self._is_known = True
            self._monitors.call("on_parameters_known")
            unmeasured: dict[str, list[str]] = {}
            for record in self._scope.table.records:
                if record.requires_grad and record.unmeasured:
                    unmeasured.setdefault(record.unmeasured, []).append(record.name)
            for reason, names in unmeasured.items():
                payload = {"what": "gradients and weights", "reason": reason, "parameters": names}
                self._notifier.event("unmeasured", payload, self._step)

    def step_opens(self, index: int) -> bool:
        """Decide whether a step is recorded: by the sampling, or because a monitor needs it."""
        self._step = index
        self._record = None
        if index and not self._is_known:
            self._announce_parameters()
        self._sampling.turns = self._scalars.turns
        self._monitors.call("on_step_start", index)
        if self._sampling.is_due(index):
            measured = HUB.spent - self._spent_until + self._device_work.spent
            spacing = self._sampling.review(index, self._spent(), self._time.elapsed(), measured)
            if spacing is not None:
                reason = "the budget of time for measuring"
                self._notifier.event("sampling", {"every": spacing, "reason": reason}, index)
        wanted = any(self._monitors.call("wants_step", index))
        is_recorded = self._sampling.wants(index) or wanted
        # An odd step of each group: the even ones are those that are recorded.
        stands_for = TIMED_STEPS if index % TIMED_STEPS == 1 else 0
        HUB.timed_steps = 1 if is_recorded else stands_for
        return is_recorded

    def next_step(self, index: int) -> int:
        """Return the next step that is recorded, or whose start a monitor needs."""
        if world().size > 1:  # what a rank does between two steps explains the stall of another
            return index + 1
        return min(self._sampling.next(index), self._monitors.next_step(index))

    def _current(self) -> StepRecord:
        rows = self._scope.table.records
        if self._record is None or len(self._record.parameters) != len(rows):
            # Where the table changed inside the step, what was measured by the old one is dropped.
            scalars = self._record.scalars if self._record is not None else {}
            in_detail = self._sampling.in_detail(self._step)
            self._record = StepRecord(self._step, self._recorded, rows, in_detail, scalars)
        return self._record

    def parameters_changed(self) -> None:
        """Record other parameters than before, and the first time that each is frozen or unfrozen."""
        records = self._scope.table.records
        small = min(MAX_QUEUED_SMALL_RECORDS, MAX_QUEUED_ROWS // max(1, len(records)))
        self._room = max(MAX_QUEUED_RECORDS, small)
        before, self._trainable = self._trainable, {record.name: record.requires_grad for record in records}
        shapes = {record.name: record.shape for record in records}
        is_other, self._shapes = shapes != self._shapes, shapes
        if is_other and (self._step or self._record is not None):
            self._notifier.event("parameters_changed", {"parameters": len(records)}, self._step)
        for value in (True, False):
            names = [n for n, flag in self._trainable.items() if flag is value and before.get(n) is not value]
            fresh = [n for n in names if n in before and (n, value) not in self._reported_flags]
            if fresh:
                self._reported_flags |= {(name, value) for name in fresh}
                payload = {"parameters": fresh, "value": value}
                self._notifier.event(REQUIRES_GRAD, payload, self._step)

    def _gradients(self, parameters: Sequence[torch.Tensor], scale: Any) -> Gradients:
        table = self._scope.table
        gradients, moved = Gradients([], [], [], scale, table), False
        for parameter, row in zip(parameters, table.rows_of(parameters), strict=True):
            if row is not None:
                gradient = part = parameter.grad
                # Most gradients are whole, and are recognised here without a call.
                if gradient is not None and type(gradient) not in PLAIN:
                    part = local(gradient)
                    if part is not gradient:
                        moved = table.place_gradient(row, gradient) or moved
                gradients.rows.append(row)
                gradients.parameters.append(parameter)
                gradients.tensors.append(part)
        if moved:
            self._current().parameters = table.records
            self._report_partial()
        return gradients

    def collect(self, parameters: Sequence[torch.Tensor], scale: torch.Tensor | float | None) -> None:
        """Measure gradients as backward left them."""
        record, summary = self._current(), self._summary
        # What the step has done so far, by which larger norms and losses are explained.
        record.scalars["forwards"], record.scalars["addends"] = summary.forwards, summary.addends
        device = parameters[0].device if parameters else None
        self._device = None if device is None or device.type in {"cpu", "meta"} else device
        with NO_SPAN if self._device is None else self._device_work.span(self._device):
            self._monitors.call("on_gradients_ready", self._gradients(parameters, scale), record)
        if not (summary.backwards or HUB.backward_depth or self._has_gradients):
            self._has_gradients = any(p.grad is not None for p in parameters)

    def backward_ended(self, parameters: Sequence[torch.Tensor], index: int) -> None:
        """Measure the gradients accumulated so far, as part ``index + 1`` of the step."""
        record = self._current()
        self._monitors.call("on_backward_end", self._gradients(parameters, None), index + 1, record)

    def update_begins(self, parameters: Sequence[torch.Tensor]) -> None:
        """Call the hooks before the optimizer step."""
        if not self._recorded:
            self._left.optimizer_begins(parameters)
        with NO_SPAN if self._device is None else self._device_work.span(self._device):
            self._monitors.call("on_before_optimizer_step", parameters, self._current())

    def update_ends(self) -> None:
        """Call the hooks after the optimizer step."""
        if not self._recorded:
            self._left.optimizer_ends()
        with NO_SPAN if self._device is None else self._device_work.span(self._device):
            self._monitors.call("on_after_optimizer_step", self._current())

    def step_closes(self, summary: StepSummary) -> None:
        """Complete the record and hand it to the writer thread."""
        record = self._current()
        self._monitors.call("on_step_end", summary, record)
        scalars = record.scalars
        scalars["time"] = clock.unix_time()
        scalars["backwards"] = summary.backwards
        scalars["backwards_seen"] = summary.backwards_seen
        for name, count in (("forwards", summary.forwards), ("addends", summary.addends)):
            if count:
                scalars[name] = count
            else:
                scalars.pop(name, None)
        if summary.undivided and (losses := min(summary.undivided + 1, self._scalars.losses)) > 1:
            scalars["losses"] = losses
        spent = self._spent()
        scalars["cost"] = spent - self._spent_before
        self._spent_before = spent
        if summary.batch is not None:
            scalars["batch"] = summary.batch
        if summary.changed_by_hand:
            scalars["clip/by_hand"] = summary.changed_by_hand
            if not self._reported_by_hand:
                self._reported_by_hand = True
                self._notifier.event("clip_by_hand", {"parameters": summary.changed_by_hand}, self._step)
        record.clips = self._left.clips = summary.clips
        self._last_recorded = self._step
        record.scale = summary.scale
        record.skipped = summary.skipped
        with NO_SPAN if self._device is None else self._device_work.span(self._device):
            record.send()
        if self._device is not None:
            self._device_work.end_group()
        if summary.without_gradient:
            self._report_missing(summary.without_gradient)
        self._report_without_backward(summary.backwards)
        waiting = self._recorded - self.dropped_records - self.stored
        has_room = waiting < self._room
        self.dropped_records += not has_room
        if waiting == self._room // 4:
            self.on_backlog()
        self._scalars.close(self._step, record if has_room else None)
        self._recorded += 1
        self._record = None

    def run_ends(
        self, step: int, parameters: Sequence[torch.Tensor], *, has_begun: bool, is_whole: bool
    ) -> None:
        """Record the gradients that the last step has left, where they are those of its backward pass."""
        if step == self._last_recorded or not self._recorded or has_begun:
            return
        gradients = [part for p in parameters if p.grad is not None and (part := local(p.grad)) is not None]
        factor = self._left.factor(gradients, self._scalars.last_norms, is_whole=is_whole)
        if factor is None:
            return
        self._step, self._record = step, None
        record = self._current()
        record.in_detail = True  # it is stored, however long the run is
        self._monitors.call(
            "on_gradients_left", self._gradients(parameters, None if factor == 1 else factor), record
        )
        record.send()
        self._scalars.close(step, record)
        self._last_recorded = step
        self._recorded += 1
        self._step, self._record = step + 1, None

    def _report_without_backward(self, backwards: int) -> None:
        # The first of all steps may have had its backward before the watch began.
        alone, self._has_gradients = self._has_gradients and not backwards, False
        if self._without_backward < STEPS_WITHOUT_BACKWARD:
            self._without_backward = self._without_backward + 1 if alone else 0
            if self._without_backward == STEPS_WITHOUT_BACKWARD:
                payload = {"what": "loss and backward", "reason": NO_BACKWARD}
                self._notifier.event("unmeasured", payload, self._step)

    def step_replayed(self, index: int) -> None:
        """State once that the gradients of such steps are not measured."""
        if not self._has_replayed:
            self._has_replayed = True
            payload = {"what": f"gradients from step {index} on", "reason": REPLAYED}
            self._notifier.event("unmeasured", payload, index)

    def _report_partial(self) -> None:
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
            self._notifier.event("unmeasured", {"what": what, "reason": reason}, self._step)

    def _report_missing(self, parameters: Sequence[ParameterRecord]) -> None:
        measured = [p.name for p in parameters if p.requires_grad and p.numel and not p.unmeasured]
        names = [name for name in measured if name not in self._reported_missing]
        if names:
            self._reported_missing.update(names)
            self._notifier.event("no_grad_at_step", {"parameters": names}, self._step)
