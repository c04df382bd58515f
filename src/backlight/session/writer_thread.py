"""The thread that takes finished steps to the store, and looks at them for what needs detail.

It is the only one that reads results; the training never waits for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backlight.measure.transfer import AsyncCopy, Slot
from backlight.session.step_record import Draft
from backlight.store.format.schema import GRADIENT

if TYPE_CHECKING:
    from backlight.session.distributed_norm import Reducing
    from backlight.session.step_recorder import Recorder
    from backlight.session.trackers.thread import Tracking
    from backlight.store.write.writer import RunWriter

_NORM = GRADIENT.floats.index("norm")
_MEASURED, _NAN, _INF = (GRADIENT.integers.index(name) for name in ("measured", "nan", "inf"))
_HISTORY = 64
_SPIKE = 20.0


class Drain:
    """Writes drafts of a recorder in the background.

    Parameters
    ----------
    recorder, writer:
        Where drafts come from and where they go.
    interval:
        Seconds between two flushes; what a kill can lose.
    on_alarm:
        Called as ``on_alarm(step, cause)`` when a step is worth detail.
    on_error:
        Called once with an exception that ended the thread's work.
    """

    def __init__(
        self,
        recorder: Recorder,
        writer: RunWriter,
        interval: float,
        on_alarm: Callable[[int, str], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._recorder = recorder
        self._writer = writer
        self._interval = interval
        self._on_alarm = on_alarm
        self._on_error = on_error
        self._stop = False
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._totals: deque[float] = deque(maxlen=_HISTORY)
        self._tables: dict[int, tuple[Any, int]] = {}
        self._dropped = 0
        self.spent = 0.0
        self.reducing: Reducing | None = None
        self.tracking: Tracking | None = None
        self._thread = threading.Thread(target=self._run, name="backlight-drain", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Write what is left and end the thread; gives up after ``timeout`` seconds."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout)

    def settle(self, timeout: float = 30.0) -> None:
        """Wait until everything handed over so far is in the store."""
        self._settled.clear()
        self._wake.set()
        if self._thread.is_alive():
            self._settled.wait(timeout)

    def _run(self) -> None:
        while True:
            asked = self._wake.wait(self._interval)
            stopping = self._stop
            begin = time.thread_time()
            try:
                if asked:
                    self._wake.clear()
                self._write(wait=asked)
                self._writer.flush()
                if self.tracking is not None:
                    self.tracking.flushed()
            except Exception as error:  # noqa: BLE001 - never break the user's training
                self._on_error(error)
                return
            self.spent += time.thread_time() - begin
            if asked:
                self._settled.set()
            if stopping:
                return

    def _write(self, *, wait: bool) -> None:
        queue = self._recorder.queue
        while queue and (wait or queue[0].ready()):
            self._store(queue.popleft())
        logged = self._recorder.user
        while logged:
            step, values = logged.popleft()
            numbers = {n: _number(v) for n, v in values.items()}
            self._writer.scalars(step, numbers, source="user")
            if self.tracking is not None:
                self.tracking.logged(step, numbers)
        if self.tracking is not None:
            self.tracking.release()
        for monitor in (self._recorder.geometry, self._recorder.replicating):
            if monitor is not None:
                monitor.queue.write(self._writer)
        dropped = self._recorder.dropped
        if dropped > self._dropped:
            self._writer.event(
                None, "dropped", {"steps": dropped - self._dropped, "reason": "the disk is too slow"}
            )
            self._dropped = dropped

    def _table(self, draft: Draft) -> int:
        key = id(draft.records)
        known = self._tables.get(key)
        if known is None or known[0] is not draft.records:
            # The records are kept beside the id, so that the id cannot be taken over.
            known = (draft.records, self._writer.parameter_table(draft.records))
            self._tables[key] = known
        return known[1]

    def _store(self, draft: Draft) -> None:
        scalars = {name: _number(value) for name, value in draft.scalars.items()}
        blobs = draft.arrays()
        if blobs:
            table = self._table(draft)
            for (series, part), (floats, integers) in blobs.items():
                self._writer.append(series, draft.step, table, floats, integers, part=part)
        scale = None if draft.scale is None else _number(draft.scale)
        if scale is not None:
            scalars["scaler/scale"] = scale
        if draft.skipped is not None:
            scalars["scaler/skipped"] = float(bool(_number(draft.skipped)))
            if scalars["scaler/skipped"]:
                self._writer.event(draft.step, "scaler_skip", {"scale": scale})
        scalars.update(_clipping(draft))
        if ("gradient", 0) in blobs:
            self._look(draft.step, *blobs["gradient", 0], scalars)
            if self.reducing is not None:
                place = scalars.get("backwards_seen", math.nan)
                self.reducing.submit(draft.step, draft.records, *blobs["gradient", 0], place)
        self._writer.scalars(draft.step, scalars)
        if self.tracking is not None:
            self.tracking.stored(draft.step, draft.records, scalars, blobs)

    def _look(self, step: int, floats: np.ndarray, integers: np.ndarray, scalars: dict[str, float]) -> None:
        measured = integers[:, _MEASURED] > 0
        if not measured.any():
            return
        total = float(np.sqrt(np.sum(np.square(floats[measured, _NORM]))))
        scalars["total_norm"] = total
        bad = int(integers[measured][:, [_NAN, _INF]].sum())
        if bad:
            # A skipped step is how a loss scale finds its size, not an alarm.
            if not scalars.get("scaler/skipped"):
                self._alarm(step, "non_finite")
            return
        if len(self._totals) >= _HISTORY // 4 and total > _SPIKE * float(np.median(self._totals)):
            self._alarm(step, "spike")
        if math.isfinite(total):
            self._totals.append(total)

    def _alarm(self, step: int, cause: str) -> None:
        self._on_alarm(step, cause)
        if self.tracking is not None:
            self.tracking.alarmed(step, cause)


def _number(value: Any) -> float:
    if isinstance(value, (AsyncCopy, Slot)):
        return float(value.read()[0])
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return float(value.real) if value.is_complex() else float(value)
    return float(value)


def _clipping(draft: Draft) -> dict[str, float]:
    """Return limit, norm before and factor of each clipping of the step; the first has no number."""
    scalars: dict[str, float] = {}
    for number, (kind, limit, norm) in enumerate(draft.clips):
        suffix = f"/{number}" if number else ""
        if math.isfinite(limit):
            scalars[f"clip/limit{suffix}"] = limit
        if kind == "total":
            scalars[f"clip/by_total{suffix}"] = 1.0
        if kind == "norm" and norm is not None:
            before = _number(norm)
            scalars[f"clip/norm{suffix}"] = before
            if math.isfinite(before):
                scalars[f"clip/factor{suffix}"] = min(1.0, limit / (before + 1e-6))
    return scalars
