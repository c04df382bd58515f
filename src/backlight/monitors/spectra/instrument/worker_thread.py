"""Background thread that measures captured steps, one after another."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backlight.devices import GATE, own_streams
from backlight.monitors.spectra.instrument.rank_exchange import exchange, offer_of
from backlight.monitors.spectra.instrument.replicate_buffer import CapturedStep, Target
from backlight.monitors.spectra.instrument.step_measurement import (
    StepMeasurement,
    StepReport,
    why_no_echo,
)
from backlight.threads import BackgroundThread

if TYPE_CHECKING:
    from backlight.monitor import Recorder
    from backlight.monitors.spectra.instrument.layer_selection import LayerSelection
    from backlight.monitors.spectra.instrument.rank_group import RankGroup
    from backlight.monitors.spectra.settings import SpectraSettings
    from backlight.notifier import Notifier

MAX_BACKLOG_STEPS = 8
"""Steps that may wait to be measured."""

_NICE = 10


class WorkerThread:
    """Background thread that measures captured steps; without ``group`` only those of this rank."""

    def __init__(
        self, options: SpectraSettings, results: Recorder, notifier: Notifier, group: RankGroup | None
    ) -> None:
        self._options, self._results, self._notifier = options, results, notifier
        self._group = group
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending = self._held = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._measurement = StepMeasurement(options, results, lambda: self._stopping)
        self._thread = BackgroundThread(target=self._run, name="backlight-spectra")

    def busy(self, size: int) -> bool:
        """Return whether a step of so many bytes must be skipped while earlier ones are measured."""
        with self._lock:
            waiting, held = self._pending, self._held
        return waiting >= MAX_BACKLOG_STEPS or (waiting > 0 and held + size > self._options.memory)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, captured: CapturedStep, targets: LayerSelection) -> None:
        """Enqueue a captured step."""
        # In an exchange the ranks agree later on the owner of each parameter.
        all_targets = self._group is not None
        mine = tuple(t for t in targets.captured if all_targets or t.name in targets.mine)
        size = captured.size
        with self._lock:
            self._pending += 1
            self._held += size
        self._jobs.put(_Job(captured, mine, dict(targets.owner_of), size))

    def stop(self, timeout_s: float) -> None:
        """Wait for the enqueued steps; after ``timeout_s`` seconds the thread ends between two layers."""
        self._jobs.put(None)
        if not self._thread.is_alive():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._stopping = True
            self._thread.join(5.0)
        if self._thread.is_alive():
            reason = f"the last measurement did not end within spectra.timeout={timeout_s:g} seconds"
            self._results.event(None, "unmeasured", {"what": "spectra", "reason": reason})
            self._notifier.warn("spectra timeout", f"spectra of the last step are not measured: {reason}")

    def _run(self) -> None:
        _lower_priority()
        while (job := self._jobs.get()) is not None:
            try:
                devices = [target.device for target in job.targets]
                with torch.no_grad(), own_streams(devices, job.captured.tensors()):
                    self._step(job)
            except Exception as error:  # noqa: BLE001 - the other steps can still be measured
                self._notifier.trouble(error, f"spectra of step {job.captured.step}")
            with self._lock:
                self._pending -= 1
                self._held -= job.size

    def _step(self, job: _Job) -> None:
        captured = job.captured
        dropped: Mapping[str, str] = {}
        if self._group is not None:
            dropped = self._run_exchange(self._group, job)
        report = self._measurement.measure(captured, job.targets)
        for name, reason in dropped.items():
            report.add(name, reason)
        self._report(captured.step, report)

    def _run_exchange(self, group: RankGroup, job: _Job) -> Mapping[str, str]:
        captured = job.captured
        for event in captured.copies_done:
            GATE.wait(event)
        try:
            mine = offer_of(captured, job.owner_of, why_no_echo(captured, min_replicates=1))
            found = exchange(group, captured, mine, self._options.memory // 2)
        except Exception as error:  # noqa: BLE001 - the other steps can still be measured
            # A rank that timed out cannot take part again: the others may be at any step.
            self._group = None
            self._notifier.trouble(error, "spectra over the replicates of all ranks, from here on")
            captured.reason = "the exchange with the other ranks failed"
            return {}
        captured.lacking.clear()  # reported by the exchange, the same on all ranks
        return found

    def _report(self, step: int, report: StepReport) -> None:
        for reason, parameters in report.unmeasured.items():
            self._results.event(
                step, "unmeasured", {"what": "spectra", "reason": reason, "parameters": parameters}
            )
            more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
            self._notifier.warn(
                f"spectra {re.sub('[0-9]+', '#', reason)}",
                f"spectra of {', '.join(parameters[:3])}{more} are not measured at step {step}: {reason}",
            )


@dataclass(frozen=True)
class _Job:
    captured: CapturedStep
    targets: tuple[Target, ...]
    owner_of: Mapping[str, int]
    size: int


def _lower_priority() -> None:
    """Lower the priority of this thread, where the system supports it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
