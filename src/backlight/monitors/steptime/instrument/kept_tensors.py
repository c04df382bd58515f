"""Tensors and graphs that outlive their step: what holds them, and how fast they grow."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import call
from typing import TYPE_CHECKING, Any

import psutil
import torch

from backlight import devices
from backlight.capture.batches import tensors_in
from backlight.capture.hub import Listener
from backlight.monitors.steptime.instrument.holders import (
    MIN_HELD,
    Holder,
    find_data_holders,
    find_graph_holder,
)
from backlight.monitors.steptime.instrument.runtime_info import memory

if TYPE_CHECKING:
    from torch import nn


# Graphs that outlive their step: marks on the roots of backward and on outputs, and whether they are alive.
#
# A mark is an object in the metadata of an autograd node. The node owns it, so that it lives as long as the
# graph does; it is followed by a weak reference, which keeps nothing alive and measures nothing.

MARKS_PER_STEP = 4
"""Marks of one kind in a step: a step of many microbatches needs no more."""

MAX_STEPS = 1024
"""Steps of kept graphs whose marks are followed; the oldest are dropped."""

MIN_SPAN = 32
"""Steps over which graphs are kept before it is reported: unrolled loops keep fewer."""

MIN_SPAN_HELD = 8
"""The same where a container of the script holds them, and no statement empties it."""

MIN_SPAN_UNKNOWN = 256
"""The same where what holds them was not found, so that it may be bounded."""

MIN_MARKED = {"loss": 8, "output": 8, "evaluation": 3}
"""Steps with a mark of each kind that are kept at least."""

_KEY = "backlight.mark"


class _Mark:
    """Lives as long as the node that owns it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True)
class KeptGraphs:
    """Graphs of earlier steps that are alive: of the marked ones from step ``since`` to ``until`` all.

    ``of`` is what was marked: ``loss``, ``output`` or ``evaluation``.
    """

    of: str
    since: int
    until: int
    marked: int


class GraphMarks(Listener):
    """Marks graphs of the steps in which it listens; ``step`` is set by its owner.

    ``under_anomaly`` is whether anomaly detection, which may end with backward, was on at the last one.
    """

    every_step = False

    def __init__(self) -> None:
        self.step = 0
        self.under_anomaly = False
        self._marks: dict[str, dict[int, list[weakref.ref[_Mark]]]] = {kind: {} for kind in MIN_MARKED}

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Mark the roots."""
        self.under_anomaly = torch.is_anomaly_enabled()
        for root in roots:
            self._mark("loss", root.grad_fn)

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Mark the inputs that have a graph, such as a hidden state."""
        for value in (*args, *kwargs.values()):
            if type(value) is not torch.Tensor or value.grad_fn is not None:
                self.forward_end(module, value)  # they are the outputs of another call

    def forward_end(self, module: nn.Module, result: Any) -> None:
        """Mark the outputs of a root module that have a graph."""
        kind = "output" if module.training else "evaluation"
        if type(result) is torch.Tensor:  # most are: a search would take longer than the mark
            self._mark(kind, result.grad_fn)
            return
        for output in tensors_in(result):
            self._mark(kind, output.grad_fn)

    def _mark(self, kind: str, node: Any) -> None:
        metadata = getattr(node, "metadata", None)
        if not isinstance(metadata, dict) or _KEY in metadata:
            return
        marks = self._marks[kind].setdefault(self.step, [])
        if len(marks) < MARKS_PER_STEP:
            metadata[_KEY] = mark = _Mark()
            marks.append(weakref.ref(mark))

    def kept(self) -> KeptGraphs | None:
        """Return the longest row of earlier steps whose graphs are all alive, None for none.

        The graph of the step before lives until the script gives its variable a new value: it does not count.
        """
        longest = None
        for kind, marks in self._marks.items():
            steps = list(marks)
            while steps and steps[-1] >= self.step - 1:
                steps.pop()
            alive = 0
            while alive < len(steps) and any(map(call, marks[steps[-1 - alive]])):
                alive += 1
            # What is before a graph that was released is in no row any more.
            for step in steps[: max(len(steps) - alive, len(steps) - MAX_STEPS)]:
                del marks[step]
            if alive and (longest is None or steps[-1] - steps[-alive] > longest.until - longest.since):
                longest = KeptGraphs(kind, steps[-alive], steps[-1], alive)
        return longest


class KeptGraphTracker:
    """Records graphs that are kept over many steps, what holds them, and the memory that it takes.

    ``record`` is called with facts as JSON types and the step; ``marks`` has to listen to the hub.
    """

    def __init__(self, record: Callable[[dict[str, Any], int], None]) -> None:
        self.marks = GraphMarks()
        self._record = record
        self._holder: Holder | None = None
        self._reported: KeptGraphs | None = None
        self._first: tuple[int, int] | None = None
        self._next_span = MIN_SPAN_HELD

    def end_step(self) -> None:
        """Look for what holds graphs that are kept, again once they are of twice as many steps."""
        kept = self.marks.kept()
        if kept is None or kept.marked < MIN_MARKED[kept.of]:
            return
        if self._first is None:
            self._first = (self.marks.step, memory_level())
        span = kept.until - kept.since
        if span < self._next_span:
            return
        self._next_span = 2 * span
        holder = find_graph_holder(sys._getframe(1))
        least = MIN_SPAN_UNKNOWN if holder is None else MIN_SPAN_HELD if holder.only_grows else MIN_SPAN
        if span < least or (holder is not None and holder.is_bounded):
            return
        self._holder, self._reported = holder, kept
        self._report(kept)

    def finish(self) -> None:
        """Record how long the graphs were kept in the end."""
        kept = self.marks.kept()
        if self._reported is not None and kept is not None and kept.since == self._reported.since:
            self._report(kept)

    def _report(self, kept: KeptGraphs) -> None:
        step, level = self._first or (0, 0)
        grown = max(memory_level() - level, 0) / max(self.marks.step - step, 1)
        holder = self._holder
        about = {
            "holder": holder and holder.to_json(),
            "only_grows": holder is not None and holder.only_grows,
        }
        self._record({**asdict(kept), "bytes_per_step": grown, **about}, self.marks.step)


def memory_level() -> int:
    """Return the bytes that are allocated on the current device, or the process has where none is in use."""
    stats = devices.allocator_statistics()
    return int(stats.get("allocated_bytes.all.current", 0)) or int(psutil.Process().memory_info().rss)


# Tensors without a graph that the script gathers step after step: what holds them, and how fast it grows.
#
# The names of the script are read at steps that double, and only while the memory in use grows. What has more
# tensors each time, and is never emptied, is recorded: an observation, not a slope of the memory.

MIN_READINGS = 3
"""Readings of a growing container before it is reported."""

MIN_GROWN_BYTES = 2**20
"""Growth of the memory in use below which nothing is read, and of a container below which it is no report."""


def doubling_steps(step: int = 7) -> Iterator[int]:
    """Yield ``step`` and its doubles."""
    while True:
        yield step
        step *= 2


class KeptDataTracker:
    """Records containers that grow from step to step, by ``record(facts, step)`` with facts as JSON types.

    :meth:`read` is called on the training thread at the end of the first step at or after ``next_step``,
    which is the next of ``steps``. With ``reads_always`` it reads also while the memory in use does not grow,
    as in the first steps, which use freed memory again. A container that was recorded and ceases to grow is
    recorded once more, with no bytes a step.
    """

    def __init__(
        self,
        record: Callable[[dict[str, Any], int], None],
        steps: Iterator[int],
        at_least: int = MIN_HELD,
        *,
        reads_always: bool = False,
    ) -> None:
        self._record = record
        self._reads_always = reads_always
        self._steps = steps
        self._at_least = at_least
        self.next_step = next(steps)
        self._level: int | None = None
        self._readings: dict[tuple[int, str], list[tuple[int, Holder]]] = {}
        self._reported: tuple[int, str] | None = None

    @property
    def is_growing(self) -> bool:
        """Whether a container grew before the last reading, so that further ones may lead to a report."""
        return any(len(readings) > 1 for readings in self._readings.values())

    def read(self, step: int) -> None:
        """Read what the names of the script hold after ``step``."""
        self.next_step = next(due for due in self._steps if due > step)
        level, before = memory_level(), self._level
        if before is None:
            self._level = level
        has_grown = before is not None and level - before >= MIN_GROWN_BYTES
        if not (has_grown or self._reads_always or self._reported is not None):
            return
        holders = find_data_holders(sys._getframe(1), self._at_least)
        if holders is None:
            return
        self._level = level
        earlier, self._readings = self._readings, {}
        for holder in holders:
            if not (holder.is_bounded or holder.is_emptied):
                readings = earlier.get((holder.key, holder.name), [])
                is_grown = bool(readings) and _extent(holder) > _extent(readings[-1][1])
                self._readings[holder.key, holder.name] = [*(readings if is_grown else []), (step, holder)]
        self._report(step)

    def _report(self, step: int) -> None:
        grown = {
            key: readings[-1][1].size - readings[0][1].size
            for key, readings in self._readings.items()
            if len(readings) >= MIN_READINGS and step - readings[0][0] >= MIN_SPAN
        }
        most = max(grown, key=lambda key: grown[key], default=None)
        if most is not None and grown[most] >= MIN_GROWN_BYTES:
            (since, _), (_, holder) = self._readings[most][0], self._readings[most][-1]
            self._reported = most
            facts = {"since": since, "bytes": holder.size, "bytes_per_step": grown[most] / (step - since)}
            about = {"device": holder.device, "is_mapping": holder.is_mapping, "holder": holder.to_json()}
            self._record(facts | about | {"capacity": memory()["capacity"]}, step)
        elif self._reported is not None and self._reported not in grown:
            self._reported = None
            self._record({"since": step, "bytes": 0, "bytes_per_step": 0.0, "holder": None}, step)


def _extent(holder: Holder) -> int:
    return holder.count or holder.size
