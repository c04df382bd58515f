"""The thread that measures replicates beside the training, one step after the other."""

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

from backlight.devices import own_streams
from backlight.monitors.spectra.instrument.replicate_buffer import Caught, Target
from backlight.monitors.spectra.instrument.shared_step import joined, offered
from backlight.monitors.spectra.instrument.step_measurement import Measuring, Report, refused, scale_of

if TYPE_CHECKING:
    from backlight.monitor import Recorder
    from backlight.monitors.spectra.instrument.layer_selection import Targets
    from backlight.monitors.spectra.instrument.rank_exchange import Exchange
    from backlight.monitors.spectra.model.options import Catching
    from backlight.notifier import Notifier

BACKLOG = 8
"""Steps that may wait to be measured."""

_NICE = 10


class WorkerThread:
    """Measures steps that were caught.

    See :class:`backlight.monitors.spectra.instrument.replicates.ReplicateMonitor`.

    Parameters
    ----------
    catching
        What is measured.
    results
        Takes the results.
    notifier
        Tells the user.
    exchange
        Brings the replicates of all ranks together; None for those of this rank alone.
    """

    def __init__(
        self, catching: Catching, results: Recorder, notifier: Notifier, exchange: Exchange | None
    ) -> None:
        self._catching, self._results, self._notifier = catching, results, notifier
        self._exchange = exchange
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending = self._held = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._measuring = Measuring(catching, results, lambda: self._stopping)
        self._thread = threading.Thread(target=self._run, name="backlight-spectra", daemon=True)

    def busy(self, size: int) -> bool:
        """Tell whether a step of so many bytes has to be passed over, for want of memory or of time."""
        with self._lock:
            waiting, held = self._pending, self._held
        return waiting >= BACKLOG or (waiting > 0 and held + size > self._catching.memory)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, caught: Caught, targets: Targets) -> None:
        """Hand a step over."""
        # In an exchange the ranks agree later on who measures what.
        everything = self._exchange is not None
        mine = tuple(t for t in targets.caught if everything or t.name in targets.mine)
        size = caught.size
        with self._lock:
            self._pending += 1
            self._held += size
        self._jobs.put(_Job(caught, mine, dict(targets.owner_of), size))

    def stop(self, patience: float) -> None:
        """Wait for what was handed over; after ``patience`` seconds the thread ends between two layers."""
        self._jobs.put(None)
        if not self._thread.is_alive():
            return
        self._thread.join(patience)
        if self._thread.is_alive():
            self._stopping = True
            self._thread.join(5.0)
        if self._thread.is_alive():
            reason = f"the last measurement did not end within spectra.patience={patience:g} seconds"
            self._results.event(None, "unmeasured", {"what": "spectra", "reason": reason})
            self._notifier.warn("spectra patience", f"spectra of the last step are not measured: {reason}")

    def _run(self) -> None:
        _behind_the_training()
        while (job := self._jobs.get()) is not None:
            try:
                with torch.no_grad(), own_streams(target.device for target in job.targets):
                    self._step(job)
            except Exception as error:  # noqa: BLE001 - never break the user's training
                self._notifier.trouble(error, f"spectra of step {job.caught.step}")
            with self._lock:
                self._pending -= 1
                self._held -= job.size

    def _step(self, job: _Job) -> None:
        caught = job.caught
        dropped: Mapping[str, str] = {}
        if self._exchange is not None:
            dropped = self._together(self._exchange, job)
        report = self._measuring.step(caught, job.targets)
        for name, reason in dropped.items():
            report.lacks(name, reason)
        self._tell(caught.step, report)

    def _together(self, exchange: Exchange, job: _Job) -> Mapping[str, str]:
        caught = job.caught
        for event in caught.arrivals:
            event.synchronize()
        try:
            mine = offered(caught, job.owner_of, scale_of(caught), refused(caught, least=1))
            found = joined(exchange, caught, mine, self._catching.memory // 2)
        except Exception as error:  # noqa: BLE001 - never break the user's training
            # Who gave up waiting cannot join again: the others may be anywhere.
            self._exchange = None
            self._notifier.trouble(error, "spectra over the replicates of all ranks, from here on")
            caught.reason = "the exchange with the other ranks failed"
            return {}
        caught.lacking.clear()  # all ranks say the same of them
        return found

    def _tell(self, step: int, report: Report) -> None:
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
    caught: Caught
    targets: tuple[Target, ...]
    owner_of: Mapping[str, int]
    size: int


def _behind_the_training() -> None:
    """Let the training go first, where the system knows the priority of a thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
