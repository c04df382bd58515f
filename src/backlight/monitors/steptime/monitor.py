"""Host time per phase of a step, pauses by the garbage collector, and how the run was executed."""

from __future__ import annotations

import gc
from collections import deque
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from backlight import clock, devices
from backlight.capture.hub import HUB
from backlight.monitor import NEVER, Monitor, RunHandle
from backlight.monitors.steptime.instrument.hook_counts import HookCounts
from backlight.monitors.steptime.instrument.kept_tensors import (
    KeptDataTracker,
    KeptGraphTracker,
    doubling_steps,
)
from backlight.monitors.steptime.instrument.machine import MachineReadings
from backlight.monitors.steptime.instrument.runtime_info import CoreWait, optimizer_groups, runtime_info
from backlight.monitors.steptime.model.evidence import (
    GARBAGE_COLLECTION,
    GROWING_HOOKS,
    KEPT_DATA,
    KEPT_GRAPHS,
    RUNTIME_INFO,
)
from backlight.monitors.steptime.model.step_line import REMAINDER
from backlight.monitors.steptime.model.step_times import OPTIMIZER_PREFIX
from backlight.records import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from backlight.capture.step_summary import StepSummary
    from backlight.session.step_recorder import StepRecord

MIN_PAUSE_S = 1e-3
"""Pauses by the garbage collector that are shorter are not recorded."""

MAX_MOMENTS = 4096
"""Begins and ends of collections that are kept between two recorded steps."""

MAX_PAUSES = 500
"""Pauses that a run records; later ones leave no event."""

DEVICE_TIME = "phases are host times; what the device does meanwhile is not separated"


class StepTimeMonitor(Monitor):
    """Seconds per phase, which add up to the step; pauses; threads, memory and compiler at the end.

    What no hook separates is one remainder that still counts in the sum: ``other``, or ``between`` where
    forward and loss are a part of it. See ``docs/formulas.md``, section 6.
    """

    name = "steptime"
    records = "times of phases"

    def attach(self, run: RunHandle) -> None:
        """Follow forwards, and the garbage collector."""
        self._run = run
        self._optimizers: list[dict[str, Any]] = []
        self._numbers: set[int] = set()
        self._core_wait: CoreWait | None = None
        self._machine: MachineReadings | None = None
        self._step = self._anomaly_steps = 0
        self._pauses = GarbagePauses(run.notifier.event, map(attrgetter("_step"), repeat(self)))
        self._kept_graphs = KeptGraphTracker(partial(self._record_fact, KEPT_GRAPHS))
        self._kept_data = KeptDataTracker(
            lambda facts, step: run.notifier.event(KEPT_DATA, facts, step), doubling_steps()
        )
        self._hooks = HookCounts(partial(self._record_fact, GROWING_HOOKS))
        run.listen(self._kept_graphs.marks)
        run.follow_forwards()
        self._pauses.start()

    def _record_fact(self, kind: str, facts: dict[str, Any], step: int) -> None:
        self._run.notifier.event(kind, facts, step)
        self._run.fact("memory", kind)

    def detach(self, error: BaseException | None) -> None:
        """Record the runtime info."""
        self._pauses.stop()
        self._kept_graphs.finish()
        info = runtime_info(
            self._optimizers, HUB.loader_workers, self._core_wait, anomaly_steps=self._anomaly_steps
        )
        self._run.notifier.event(RUNTIME_INFO, info, max(self._run.clock.done - 1, 0))

    def next_step(self, step: int) -> int:
        """Return :data:`NEVER`: graphs are marked in the steps that are observed anyway."""
        return NEVER

    def on_step_start(self, step: int) -> None:
        """Name the step to what marks graphs."""
        self._step = self._kept_graphs.marks.step = step

    def on_parameters_known(self) -> None:
        """Read the optimizers, which may be gone when the run ends."""
        self._core_wait = CoreWait()
        scope = self._run.scope
        self._optimizers = [g for o in scope.optimizers() for g in optimizer_groups(o, scope.number(o))]
        self._numbers = {group["optimizer"] for group in self._optimizers}
        names = sorted({record.device for record in self._run.scope.table.records})
        kinds = {name.split(":")[0] for name in names} - {"cpu"}
        if kinds:
            self._run.notifier.unmeasured(f"device time on {', '.join(sorted(kinds))}", DEVICE_TIME)
        device = next((name for name in names if name.startswith("cuda")), None)
        missing = partial(self._run.notifier.unmeasured, "utilization of the GPU")
        self._machine = MachineReadings(None if device is None else devices.uuid_of(device), missing)

    def on_flush(self) -> None:
        """Read the machine; on the writer thread."""
        step = self._run.clock.done - 1
        if self._machine is not None and step >= 0 and (values := self._machine.read(step)):
            self._run.recorder.scalars(step, values)

    def on_step_end(self, summary: StepSummary, record: StepRecord) -> None:
        """Add one scalar per phase, and record the pauses since the last recorded step and what is kept."""
        self._pauses.flush()
        self._anomaly_steps += self._kept_graphs.marks.under_anomaly
        self._step += 1  # a pause from here on is of no recorded step, until the next one starts
        self._kept_graphs.end_step()
        if self._step >= self._kept_data.next_step:
            self._kept_data.read(self._step)
            scope = self._run.scope
            self._hooks.read(self._step, [(scope.prefix(root), root) for root in scope.roots()])
        record.scalars.update({f"phase/{phase}": seconds for phase, seconds in summary.phases.items()})
        rest = summary.seconds - sum(summary.phases.values())
        record.scalars[f"phase/{Phase.OTHER if summary.separated else REMAINDER}"] = max(rest, 0.0)
        if len(self._numbers) > 1:
            record.scalars.update(optimizer_scalars(summary.optimizer_seconds))


def optimizer_scalars(seconds: Mapping[int, float]) -> dict[str, float]:
    """Return the scalars of a step of several optimizers."""
    return {f"{OPTIMIZER_PREFIX}{number}": spent for number, spent in seconds.items()}


class GarbagePauses:
    """Records pauses by Python's garbage collector as events, by ``record(kind, payload, step)``.

    The collector runs wherever an object is made, also while a lock of the writer is held: a pause is only
    kept until :meth:`flush` is called at a safe point. ``steps`` gives the step in progress each time; it and
    everything else that the collector calls runs no Python code: what a signal handler of the script raises
    there would be lost.
    """

    def __init__(
        self, record: Callable[[str, dict[str, Any], int | None], None], steps: Iterator[int]
    ) -> None:
        self._record = record
        self._left = MAX_PAUSES
        self._moments: deque[tuple[str, float, int]] = deque(maxlen=MAX_MOMENTS)
        now = iter(clock.perf_counter, None)

        def noting(phase: str) -> property:
            return property(partial(next, map(self._moments.append, zip(repeat(phase), now, steps))))

        # The collector calls it with "start" or "stop", and with a dictionary, here the default.
        self._on_collection = partial(
            getattr, type("Phases", (), {phase: noting(phase) for phase in ("start", "stop")})()
        )

    def start(self) -> None:
        """Register with the garbage collector."""
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Unregister, and record what is left."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        self.flush()

    def flush(self) -> None:
        """Record the pauses since the last call."""
        began = None
        while self._moments:
            phase, moment, step = self._moments.popleft()
            if phase == "start":
                began = moment
            elif began is not None and moment - began >= MIN_PAUSE_S and self._left > 0:
                self._left -= 1
                self._record(GARBAGE_COLLECTION, {"seconds": moment - began}, step)
