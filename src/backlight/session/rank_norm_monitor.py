"""The norm of the gradients over all ranks while a run goes on: collectives of backlight, on request only.

Each rank hands the rows of its recorded steps to rank 0, which joins them as a reader does. That happens in a
thread of its own, over a process group of its own next to the user's, and gives up after a time: a rank that
does not come costs the number, never the training run.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch.distributed as dist

from backlight.monitor import Monitor, RunContext, StoredStep
from backlight.records import ParameterRecord
from backlight.store.format.schema import GRADIENT
from backlight.store.read.frames import Frame, Holders, join_ranks, model_order, total
from backlight.store.read.rank_file import Block
from backlight.threads import BackgroundThread

if TYPE_CHECKING:
    from backlight.session.settings import Settings

SCALAR = "reduced/total_norm"

TIMEOUT_S = 60.0
"""Seconds that a rank waits for the others."""

FAILED_TIMEOUT_S = 5.0
"""The same at the end of a run that failed: the others may be waiting for this rank."""

_NORM, _MEASURED = GRADIENT.floats.index("norm"), GRADIENT.integers.index("measured")


class RankNormMonitor(Monitor):
    """Joins the norms of all ranks at every Nth step, and publishes the total on rank 0."""

    name = "rank_norm"
    requested_by = None
    records = "the norm over all ranks while the training runs"
    order = 10  # after the gradients

    def __init__(self, every: int) -> None:
        self._every = every
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None
        self._off = False
        self._sent: tuple[ParameterRecord, ...] | None = None
        self._tables: dict[int, dict[str, ParameterRecord]] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor where ``reduce`` is set."""
        return cls(settings.every or 1) if settings.reduce else None

    def check_process(self, *, is_script: bool) -> None:
        """Refuse a process without a process group (RuntimeError); a script may make its own."""
        if not (is_script or _is_initialized()):
            raise RuntimeError(
                "watch: reduce=True reduces over all ranks, but no process group is initialised; call "
                "torch.distributed.init_process_group before the watch is entered, or leave reduce out: the "
                "reader joins what the ranks store"
            )

    def attach(self, run: RunContext) -> None:
        """Remember where results go."""
        self._run = run

    def on_step_start(self, step: int) -> None:
        """Create the group once the first step is over: every rank does so, on the training thread."""
        if not step or self._thread is not None or self._off:
            return
        if not _is_initialized():
            raise RuntimeError("no process group is initialised")
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._thread = BackgroundThread(target=self._work, name="backlight-rank-norm")
        self._thread.start()

    def on_step_stored(self, step: StoredStep) -> None:
        """Take the gradients' rows of a recorded step."""
        # What the last step has left has none: each rank measures it, or does not, on its own.
        position = step.scalars.get("backwards_seen")
        is_joined = step.step % self._every == 0 and position is not None
        if not self._off and is_joined and ("gradient", 0) in step.blobs:
            floats, integers = step.blobs["gradient", 0]
            # The backward passes up to this step: ranks that are out of step differ in it.
            norms, measured = floats[:, _NORM], integers[:, _MEASURED] > 0
            self._waiting.put((step.step, step.parameters, norms, measured, position))

    def on_all_stored(self, *, failed: bool) -> None:
        """Join what is left, and end; not for long where the training run failed."""
        if self._thread is not None:
            self._waiting.put(None)
            # Longer than the group waits, so that a rank that does not come is reported.
            self._thread.join(FAILED_TIMEOUT_S if failed else TIMEOUT_S + 5.0)
        self._off = True

    def _work(self) -> None:
        step = 0
        try:
            while (given := self._waiting.get()) is not None:
                step = given[0]
                self._gather(*given)
        except Exception as error:  # noqa: BLE001 - the thread ends; the training run goes on
            self._off = True
            gone = RuntimeError(
                f"the process group was destroyed before step {step} was joined; the reader joins it, and "
                "what comes after it, from what the ranks stored"
            )
            self._run.notifier.trouble(error if _is_initialized() else gone, self.records)

    def _gather(
        self, step: int, records: tuple[ParameterRecord, ...], norms: Any, measured: Any, position: float
    ) -> None:
        news = records if records is not self._sent else None
        self._sent = records
        offers: list[Any] | None = [None] * self._size if self._rank == 0 else None
        dist.gather_object((step, news, norms, measured, position), offers, dst=0, group=self._group)
        if offers is None:
            return
        for rank, (_, table, *_rest) in enumerate(offers):
            if table is not None:
                self._tables[rank] = {p.name: p for p in table}
        if len({offer[0] for offer in offers}) == 1:
            value = self._joined(step, offers)
            if value is not None:
                self._run.publish("total_norm", step, value)
                self._run.writer.scalars(step, {SCALAR: value})

    def _joined(self, step: int, offers: list[Any]) -> float | None:
        tables: list[Mapping[str, ParameterRecord]] = [self._tables[rank] for rank in range(self._size)]
        names = model_order([list(table) for table in tables])
        column = {name: p for p, name in enumerate(names)}
        blocks = []
        for table, (_, _, norms, measured, _) in zip(tables, offers, strict=True):
            columns = [column[name] for name in table]
            norm_SP, mask_SP = np.full((1, len(names)), np.nan), np.zeros((1, len(names)), dtype=bool)
            norm_SP[0, columns], mask_SP[0, columns] = norms, measured
            blocks.append(Block(np.array([step], dtype=np.int64), {"norm": norm_SP}, mask_SP))
        positions = [{step: offer[4]} for offer in offers]
        joined = join_ranks(blocks, Holders(tables, names), "gradient", positions)
        norms = Frame(
            joined.steps, names, joined.columns["norm"], joined.measured, "gradient", joined.any_rank
        )
        _, known = total(norms)
        return float(known[0]) if len(known) else None


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
