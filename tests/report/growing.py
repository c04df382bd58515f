"""A stored run that grows step by step, for tests that read a run while it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from synthetic import Plan, fingerprint, gradient_row, records, rms_of, update_row

from backlight.records import Layout, ParameterRecord, Placement, RunStatus
from backlight.store.write.writer import RunWriter

FLUSH = 200
"""Steps between flushes."""

MONITORS = ("health", "steptime")


def shard_of(record: ParameterRecord, rank: int, world_size: int) -> ParameterRecord:
    """Return the record of a parameter that is sharded evenly along its first dimension."""
    rows = record.shape[0] // world_size
    local = (rows, *record.shape[1:])
    offset = (rank * rows, *(0 for _ in record.shape[1:]))
    placement = Placement(Layout.SHARD, record.shape, local, offset)
    return dataclasses.replace(record, numel=int(np.prod(local)), placement=placement)


class Growing:
    """Writer of at most ``plan.steps`` steps, some at a time.

    ``sharded``: each rank holds a part of every parameter and has its own values.
    """

    def __init__(
        self,
        path: Path,
        plan: Plan | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        sharded: bool = False,
    ) -> None:
        self.plan = plan or Plan(steps=600, blocks=1)
        self.path = path
        self.done = 0
        self.writer = RunWriter.create(
            path, name=path.name, script="train.py", monitors=MONITORS, rank=rank, world_size=world_size,
            run_id="grown" if world_size > 1 else None, resume=True,
        )  # fmt: skip
        table = records(self.plan)
        if sharded:
            table = tuple(shard_of(record, rank, world_size) for record in table)
        self.names = [record.name for record in table]
        self.writer.fingerprint(fingerprint(table))
        self._table = self.writer.parameter_table(table)
        self._numel = np.array([record.numel for record in table])
        self._rms = rms_of(self.plan, np.arange(self.plan.steps), len(table))
        self._draw = np.random.default_rng(5 + rank * sharded)

    def steps(self, amount: int, *, broken: int | None = None) -> None:
        """Write ``amount`` steps; the gradient of the row ``broken`` holds NaN at the last of them."""
        for step in range(self.done, self.done + amount):
            floats, integers = gradient_row(self._rms[step], self._numel, self._draw)
            if broken is not None and step == self.done + amount - 1:
                floats[broken], integers[broken, 3] = np.nan, self._numel[broken]
            self.writer.append("gradient", step, self._table, floats, integers)
            moved, sampled = update_row(self._rms[step], self._numel, integers[:, 0], self._draw, 0.5)
            self.writer.append("update", step, self._table, moved, sampled)
            total = float(np.sqrt(np.sum(floats[:, 0] ** 2)))
            self.writer.scalars(step, {
                "loss": 3.0 / (1 + 0.01 * step), "total_norm": total, "lr/0/0": 0.1,
                "backwards_seen": step + 1.0,
                "phase/forward": 0.010, "phase/backward": 0.020 + 0.001 * (step % 3),
            })  # fmt: skip
            self.writer.scalars(step, {"train_accuracy": step / self.plan.steps}, source="user")
            if step % FLUSH == FLUSH - 1:
                self.writer.flush()  # the writer drops rows when the disk is too slow
        self.done += amount
        self.writer.flush()

    def close(self, status: RunStatus = RunStatus.FINISHED) -> None:
        """End the run."""
        self.writer.close(status)


Grow = Callable[..., Growing]
"""Type of the fixture ``grow``."""
