"""Tensors without a graph that the script gathers step after step: what holds them, and how fast it grows.

The names of the script are read at steps that double, and only while the memory in use grows. What has more
tensors each time, and is never emptied, is recorded: an observation, not a slope of the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from backlight.monitors.steptime.instrument.holders import MIN_HELD, Holder, find_data_holders
from backlight.monitors.steptime.instrument.kept_graphs import MIN_SPAN, memory_level
from backlight.monitors.steptime.instrument.runtime_info import memory

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
