"""What every check shares: the steps that it observes, reports, and values that are still on a device."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from backlight import devices
from backlight.capture.hub import Listener
from backlight.measure.transfer import AsyncCopy, start_copy
from backlight.monitors.correctness.instrument.loaded_weights import LoadedWeights
from backlight.monitors.correctness.instrument.samples import Snapshot
from backlight.monitors.correctness.model.contradictions import KIND

if TYPE_CHECKING:
    from backlight.monitor import RunContext

FIRST_STEPS = 8
"""Steps at the start of a run that are all observed."""

GROWTH = 1.6
"""Factor between the starts of later observations."""

WINDOW_STEPS = 2
"""Steps in a row of a later observation: many facts compare one step with the next."""

NAMED = 5
"""Parameters or modules that a report names."""

MAX_REPORTS = 16
"""Contradictions of one kind that a process records."""


@dataclass
class _Batch:
    """Values that one copy takes to the host together, behind the work of their stream."""

    stream: torch.Stream | None
    values: list[torch.Tensor] = field(default_factory=list)
    copy: AsyncCopy | None = None

    def add(self, value: torch.Tensor) -> _Slot:
        """Add a value, which nothing may change until the copy has started."""
        value = value.detach()
        begin = sum(one.nbytes for one in self.values)
        self.values.append(value)
        return _Slot(self, slice(begin, begin + value.nbytes), value.dtype, value.shape)

    def start(self) -> None:
        """Start the copy."""
        with devices.on_stream(self.stream):
            parts = [value.reshape(-1).view(torch.uint8) for value in self.values]
            self.copy = start_copy(torch.cat(parts) if len(parts) > 1 else parts[0])
        self.values = []


@dataclass(frozen=True)
class _Slot:
    """The place of a value in the copy of its batch."""

    batch: _Batch
    part: slice
    dtype: torch.dtype
    shape: torch.Size

    def is_done(self) -> bool:
        """Return whether the host may read."""
        return self.batch.copy is not None and self.batch.copy.done()

    def read(self) -> NDArray[np.generic]:
        """Wait for the copy, and return a value of its own."""
        assert self.batch.copy is not None
        content = self.batch.copy.read()[self.part].tobytes()
        value = torch.frombuffer(bytearray(content), dtype=self.dtype) if content else torch.empty(0)
        return _array(value.reshape(self.shape))


def _array(value: torch.Tensor) -> NDArray[np.generic]:
    """Return a tensor on the host as an array; NumPy has no bfloat16."""
    array: NDArray[np.generic] = (value.float() if value.dtype is torch.bfloat16 else value.detach()).numpy()
    return array


class PendingCopies:
    """Values on their way from a device, with what is done with each, in order; the checks share one.

    Those of a step are copied together, when the next one begins.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[torch.device, int], _Batch] = {}
        self._waiting: deque[tuple[list[_Slot | NDArray[np.generic]], Callable[..., None]]] = deque()

    def add(self, then: Callable[..., None], *values: torch.Tensor) -> None:
        """Call ``then`` with the values on the host, as soon as they and all earlier ones are there."""
        slots = [self._slot(value) for value in values]
        if not self._waiting and not any(isinstance(slot, _Slot) for slot in slots):
            then(*slots)
        else:
            self._waiting.append((slots, then))

    def _slot(self, value: torch.Tensor) -> _Slot | NDArray[np.generic]:
        if value.device.type == "cpu":
            return _array(value)
        stream = devices.current_stream(value.device) if devices.has_async_copies(value.device) else None
        key = value.device, 0 if stream is None else stream.stream_id
        return self._batches.setdefault(key, _Batch(stream)).add(value)

    def settle(self, *, wait: bool) -> None:
        """Use the values that have arrived; ``wait`` for the others as well."""
        if self._batches and (wait or not devices.GATE.is_closed):
            batches, self._batches = self._batches, {}
            for batch in batches.values():
                batch.start()
        while self._waiting:
            slots, then = self._waiting[0]
            if not wait and not all(slot.is_done() for slot in slots if isinstance(slot, _Slot)):
                return
            self._waiting.popleft()
            then(*[slot.read() if isinstance(slot, _Slot) else slot for slot in slots])


class Schedule:
    """Which steps are observed: the first ones, then windows of a few steps at growing intervals.

    ``due`` is whether this step is, ``near`` whether it or the step before or after it is, ``observed`` how
    many steps were. ``copies`` are those of all checks, ``loaded`` the weights that come from a file.
    """

    def __init__(self) -> None:
        self._begin = round(FIRST_STEPS * GROWTH)
        self.due = self.near = True
        self.observed = 0
        self.copies = PendingCopies()
        self.loaded = LoadedWeights()

    def begin(self, step: int) -> None:
        """Decide about ``step``; steps only grow."""
        self.observed += self.due and step > 0  # the step before, which is over
        while step > self._begin + WINDOW_STEPS:
            self._begin = max(round(self._begin * GROWTH), self._begin + WINDOW_STEPS)
        end = self._begin + WINDOW_STEPS
        self.due = step < FIRST_STEPS or self._begin <= step < end
        self.near = step <= FIRST_STEPS or self._begin - 1 <= step <= end

    def next_step(self, step: int) -> int:
        """Return the first step after ``step`` about which something is to be decided."""
        return step + 1 if self.near else max(step + 1, self._begin - 1)


class Check(Listener):
    """Compares facts of one kind as a run goes on, and reports those that contradict each other.

    What is compared on a device is copied from there without waiting; the report follows when the copy has
    arrived. One that ``is_windowed`` gets events of observed steps and of the steps beside them only.
    """

    is_windowed = True
    every_step = False

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        self.run, self.schedule = run, schedule
        self._reports: Counter[str] = Counter()

    @property
    def reads_gradients(self) -> bool:
        """Whether this step is observed, or one beside it."""
        return self.schedule.near

    @property
    def due(self) -> bool:
        """Whether this step is observed; while several threads train, weights change at any time."""
        return self.schedule.due and not self.run.hub.training.missed

    def forget(self) -> None:
        """Drop what waits for a later event: the next events are not delivered."""

    def report(self, rule: str, step: int, **facts: Any) -> None:
        """Record a contradiction."""
        case = f"{rule} {facts.get('kind', '')}"
        self._reports[case] += 1
        if self._reports[case] <= MAX_REPORTS:
            self.run.notifier.event(KIND, {"rule": rule, **facts}, step)
            self.run.fact(rule)

    def when_known(self, then: Callable[..., None], *values: torch.Tensor) -> None:
        """Call ``then`` with the arrays of ``values``, as soon as they and all earlier ones are on the host.

        Nothing may change the values until the step is over.
        """
        self.schedule.copies.add(then, *values)

    def snapshot(
        self,
        samples: Sequence[torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Snapshot:
        """Copy samples of tensors; they are on the host when a later :meth:`when_known` calls back."""
        taken = Snapshot(samples, change)
        self.when_known(taken.arrive, *taken.tables)
        return taken

    def name(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter, empty where the table does not hold it."""
        table = self.run.scope.table
        row = table.row(parameter)
        return "" if row is None else table.records[row].name
