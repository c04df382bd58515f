"""Background thread that writes completed steps and results of monitors; training never waits for it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backlight import clock
from backlight.distributed import world
from backlight.measure.transfer import AsyncCopy, Slot
from backlight.monitor import StoredStep
from backlight.session.step_recorder import StepRecord
from backlight.store.format.schema import DROPPED, is_of_every_step
from backlight.threads import PAUSE_S, BackgroundThread

if TYPE_CHECKING:
    from backlight.records import ParameterRecord
    from backlight.session.monitor_set import MonitorSet
    from backlight.session.sampling import StepSelection
    from backlight.session.step_recorder import StepRecorder
    from backlight.store.write.writer import RunWriter

GRADIENT = ("gradient", 0)
"""Key of the gradients of a whole step."""

SELECTED = (
    "the run is long: from here on the first step of a window is stored, and those whose loss or gradients "
    "stand out; --every N stores all that it records"
)
"""Why not every recorded step is stored."""

STOP_TIMEOUT_S = 30.0
"""Seconds that the end of a run waits for the thread."""

ROWS_AT_ONCE = 128
"""Steps that are written without a pause, in about a millisecond."""

RECORD_ROWS = 16
"""Steps without a record that take as long to write as one with a record."""


class ResultQueue:
    """Keeps results of monitors, from any thread, until the writer thread stores them."""

    def __init__(self) -> None:
        self.calls: deque[tuple[str, tuple[Any, ...], dict[str, Any]]] = deque()

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        """Keep scalars of one step."""
        self.calls.append(("scalars", (step, dict(values), source), {}))

    def array(
        self,
        name: str,
        step: int,
        values: Any,
        *,
        dims: tuple[str, ...] = (),
        unit: str = "1",
        encoding: str = "plain",
    ) -> None:
        """Keep one array."""
        self.calls.append(("array", (name, step, values), {"dims": dims, "unit": unit, "encoding": encoding}))

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Keep one event."""
        self.calls.append(("event", (step, kind, payload), {}))

    def write(self, writer: RunWriter) -> None:
        """Hand everything over to ``writer``, in order."""
        methods: dict[str, Callable[..., Any]] = {
            "scalars": writer.scalars,
            "array": writer.array,
            "event": writer.event,
        }
        while self.calls:
            method, arguments, named = self.calls.popleft()
            methods[method](*arguments, **named)


class WriterThread:
    """Writes the records of a step recorder, and what monitors have measured off the step's path.

    It flushes every ``interval`` seconds, what a kill can lose, and shows each step to ``monitors`` before it
    is stored. ``selection`` returns the recorded steps that are stored, None for all. ``on_error`` is called
    once with an exception that ended its work. ``spent`` are processor seconds.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        results: ResultQueue,
        monitors: MonitorSet,
        writer: RunWriter,
        interval: float,
        on_error: Callable[[Exception], None],
        selection: StepSelection[StoredStep] | None = None,
    ) -> None:
        self._selection = selection
        self._recorder, self._results = recorder, results
        self._monitors, self._writer = monitors, writer
        self._interval = interval
        self._on_error = on_error
        self._stop = self._is_settling = False
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._tables: dict[int, tuple[Any, int]] = {}
        self._dropped = 0
        self._is_selecting = False
        self.spent = 0.0
        self._thread = BackgroundThread(target=self._run, name="backlight-writer")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Write what is left and end the thread; gives up after ``timeout`` seconds."""
        self._recorder.scalars.send()
        self._stop = True
        self._wake.set()
        self._thread.join(timeout)

    def flush_soon(self) -> None:
        """Write and flush what is there now, without waiting for the interval; from any thread."""
        self._wake.set()

    def settle(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Wait until everything handed over so far is in the store; for the training thread."""
        self._recorder.scalars.send()
        self._settled.clear()
        self._is_settling = True
        self._wake.set()
        if self._thread.is_alive():
            self._settled.wait(timeout)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval)
            self._wake.clear()
            stopping, settling = self._stop, self._is_settling
            self._is_settling = False
            begin = clock.thread_time()
            try:
                self._write(wait=stopping or settling)
                if stopping and self._selection is not None:
                    self.put(self._selection.flush())
                elif not settling:
                    clock.sleep(PAUSE_S)
                self._writer.flush()
                self._monitors.call("on_flush")
            except Exception as error:  # noqa: BLE001 - never break the user's training
                self._on_error(error)
                return
            self.spent += clock.thread_time() - begin
            if settling:
                self._settled.set()
            if stopping:
                return

    def _write(self, *, wait: bool) -> None:
        rows = 0
        while (row := self._recorder.scalars.take(wait=wait)) is not None:
            rows += 1 if row.record is None else RECORD_ROWS
            if rows >= ROWS_AT_ONCE and not (wait or self._recorder.is_behind):
                clock.sleep(PAUSE_S)
                rows = 0
            scalars = row.scalars()
            self._writer.scalars(row.step, scalars)
            if row.record is not None:
                self._store(row.record, scalars)
                self._recorder.stored += 1
            else:
                self._monitors.call("on_step_scalars", row.step, scalars)
        self._recorder.scalars.ask()
        logged = self._recorder.logged
        while logged:
            step, values = logged.popleft()
            numbers = {name: _number(value) for name, value in values.items()}
            self._writer.scalars(step, numbers, source="user")
            self._monitors.call("on_scalars_logged", step, numbers)
        self._results.write(self._writer)
        self._writer.reach(self._recorder.completed - 1)
        dropped = self._recorder.dropped_records + self._recorder.scalars.dropped
        if dropped > self._dropped:
            payload = {"steps": dropped - self._dropped, "reason": "the disk is too slow"}
            self._writer.event(None, DROPPED, payload)
            self._dropped = dropped

    def _table(self, parameters: tuple[ParameterRecord, ...]) -> int:
        key = id(parameters)
        entry = self._tables.get(key)
        if entry is None or entry[0] is not parameters:
            # The records are kept with the id, so that no other object can get that id.
            entry = (parameters, self._writer.parameter_table(parameters))
            self._tables[key] = entry
        return entry[1]

    def _store(self, record: StepRecord, scalars: dict[str, float]) -> None:
        scalars |= {name: _number(value) for name, value in record.scalars.items()}
        blobs = record.arrays()
        scale = None if record.scale is None else _number(record.scale)
        if scale is not None:
            scalars["scaler/scale"] = scale
        if record.skipped is not None:
            scalars["scaler/skipped"] = float(bool(_number(record.skipped)))
            if scalars["scaler/skipped"]:
                self._writer.event(record.step, "scaler_skip", {"scale": scale})
        scalars.update(_clipping(record, scalars))
        # Before the scalars are written: monitors add some of their own.
        step = StoredStep(record.step, record.parameters, scalars, blobs)
        self._monitors.call("on_step_stored", step)
        self.keep(step, in_detail=record.in_detail)

    def keep(self, step: StoredStep, *, in_detail: bool) -> None:
        """Store a step, or what the selection makes of it."""
        if self._selection is None:
            self.put([step])
            return
        updates = ("update", 0) in step.blobs
        stored = self._selection.add(step.step, step, _scores(step), updates=updates, in_detail=in_detail)
        if not stored and not self._is_selecting:
            self._is_selecting = True
            self._writer.event(step.step, "stored_steps", {"reason": SELECTED})
        self.put(stored)

    def put(self, steps: Sequence[StoredStep]) -> None:
        """Store steps as they are."""
        for step in steps:
            if step.blobs:
                table = self._table(step.parameters)
                for (series, part), (floats, integers) in step.blobs.items():
                    self._writer.append(series, step.step, table, floats, integers, part=part)
            others = {name: value for name, value in step.scalars.items() if not is_of_every_step(name)}
            self._writer.scalars(step.step, others)


def _number(value: Any) -> float:
    if isinstance(value, (AsyncCopy, Slot)):
        return float(value.read()[0])
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return float(value.real) if value.is_complex() else float(value)
    return float(value)


def _scores(step: StoredStep) -> list[float]:
    """Return the numbers by which a step may stand out: its loss and its largest gradient norm."""
    if world().size > 1:  # shards are joined at the steps that all ranks have stored
        return []
    floats = step.blobs[GRADIENT][0] if GRADIENT in step.blobs else np.zeros((0, 1))
    norm = float(floats[:, 0].max(initial=-math.inf))
    return [step.scalars.get("loss", -math.inf), norm]


def _clipping(record: StepRecord, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return limit and factor of each clipping of the step; the first has no number."""
    scalars_of: dict[str, float] = {}
    for number, kind, limit in record.clips:
        suffix = f"/{number}" if number else ""
        if math.isfinite(limit):
            scalars_of[f"clip/limit{suffix}"] = limit
        if kind == "total":
            scalars_of[f"clip/by_total{suffix}"] = 1.0
        before = scalars.get(f"clip/norm{suffix}", math.nan)
        if kind == "norm" and math.isfinite(before):
            scalars_of[f"clip/factor{suffix}"] = min(1.0, limit / (before + 1e-6))
    return scalars_of
