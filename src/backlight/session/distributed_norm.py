"""The norm of the gradients over all ranks while a training runs: collectives of ours, on request.

Each rank hands the rows of its recorded steps to rank 0, which joins them as a reader does. That happens in
a thread beside the training, over a process group of our own next to the user's, and gives up after a
time: a rank that does not come costs the number, never the training.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from backlight.records import ParameterRecord
from backlight.store.format.schema import GRADIENT
from backlight.store.read.frames import Block, join_ranks, model_order, total

if TYPE_CHECKING:
    from backlight.notifier import Notifier
    from backlight.session.settings import Settings

SCALAR = "reduced/total_norm"
PATIENCE = 60.0
"""Seconds that a rank waits for the others."""

LOST = "the norm over all ranks while the training runs"
_NORM, _MEASURED = GRADIENT.floats.index("norm"), GRADIENT.integers.index("measured")


class Reducing:
    """Joins the norms of all ranks, step after step.

    Parameters
    ----------
    settings:
        Whether it is asked for; and ``every``: only steps that it divides are joined: all ranks record them.
    notifier:
        Tells the user what goes wrong, and takes the results into the run.
    launched:
        The script runs inside the watch, and makes its process group there.

    Attributes
    ----------
    latest:
        Step and total norm that were joined last; None on other ranks than 0, and before the first.
    """

    def __init__(self, settings: Settings, notifier: Notifier, *, launched: bool) -> None:
        self._every = settings.every or 1
        self._notifier = notifier
        self._launched = launched
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._off = not settings.reduce
        self._said: tuple[ParameterRecord, ...] | None = None
        self._tables: dict[int, dict[str, ParameterRecord]] = {}
        self.latest: tuple[int, float] | None = None

    def check(self) -> None:
        """Refuse where there is nobody to reduce with, before anything is attached.

        Raises
        ------
        RuntimeError
            If no process group is initialised.
        """
        if not (self._off or self._launched or _initialised()):
            raise RuntimeError(
                "watch: reduce=True reduces over all ranks, but no process group is initialised; call "
                "torch.distributed.init_process_group before the watch is entered, or leave reduce out: the "
                "reader joins what the ranks store"
            )

    def begin(self) -> None:
        """Make the group and start the thread; every rank calls this, on the thread that trains."""
        if self._thread is not None or self._off:
            return
        if not _initialised():
            self._off = True
            self._notifier.trouble(RuntimeError("no process group is initialised"), LOST)
            return
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self._off = True
            self._notifier.trouble(error, LOST)
            return
        self._thread = threading.Thread(target=self._run, name="backlight-reducing", daemon=True)
        self._thread.start()

    def submit(
        self, step: int, records: tuple[ParameterRecord, ...], floats: Any, integers: Any, place: float
    ) -> None:
        """Take the gradients' rows of a recorded step; ``place`` counts the backward passes up to it."""
        if not self._off and step % self._every == 0:
            self._waiting.put((step, records, floats[:, _NORM], integers[:, _MEASURED] > 0, place))

    def stop(self, *, failed: bool) -> None:
        """Join what is left, and end; not for long where the training failed."""
        if self._thread is not None:
            self._waiting.put(None)
            # Longer than the group waits, so that a rank that does not come is told.
            self._thread.join(5.0 if failed else PATIENCE + 5.0)
        self._off = True

    def _run(self) -> None:
        step = 0
        try:
            while (given := self._waiting.get()) is not None:
                step = given[0]
                self._together(*given)
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self._off = True
            gone = RuntimeError(
                f"the process group was destroyed before step {step} was joined; the reader joins it, and "
                "what comes after it, from what the ranks stored"
            )
            self._notifier.trouble(error if _initialised() else gone, LOST)

    def _together(
        self, step: int, records: tuple[ParameterRecord, ...], norms: Any, measured: Any, place: float
    ) -> None:
        news = records if records is not self._said else None
        self._said = records
        offers: list[Any] | None = [None] * self._size if self._rank == 0 else None
        dist.gather_object((step, news, norms, measured, place), offers, dst=0, group=self._group)
        if offers is None:
            return
        for rank, (_, table, *_rest) in enumerate(offers):
            if table is not None:
                self._tables[rank] = {p.name: p for p in table}
        if len({offer[0] for offer in offers}) == 1:
            value = self._joined(step, offers)
            if value is not None:
                self.latest = (step, value)
                if self._notifier.writer is not None:
                    self._notifier.writer.scalars(step, {SCALAR: value})

    def _joined(self, step: int, offers: list[Any]) -> float | None:
        tables: list[Mapping[str, ParameterRecord]] = [self._tables[rank] for rank in range(self._size)]
        names = model_order([list(table) for table in tables])
        at = {name: p for p, name in enumerate(names)}
        blocks = []
        for table, (_, _, norms, measured, _) in zip(tables, offers, strict=True):
            places = [at[name] for name in table]
            norm_SP, mask_SP = np.full((1, len(names)), np.nan), np.zeros((1, len(names)), dtype=bool)
            norm_SP[0, places], mask_SP[0, places] = norms, measured
            blocks.append(Block(np.array([step], dtype=np.int64), {"norm": norm_SP}, mask_SP))
        positions = [{step: offer[4]} for offer in offers]
        return total(join_ranks(blocks, tables, "gradient", names, positions)).get(step)


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()
