"""Sends the numbers of a live run to trackers: off the step's path, one thread for each tracker.

The writer thread hands over each step that it stores. A tracker that is slow loses the oldest points; one
that raises is named once and left out. The training run never waits for one. New findings are sent while the
run goes on, and all of them at its end.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from backlight import clock
from backlight.findings.evaluate import separate_hints
from backlight.interrupts import is_interrupt, suppressed
from backlight.monitor import NEVER, Output, RunHandle, StoredStep
from backlight.records import Finding, ParameterRecord
from backlight.session.trackers.base import Point, Sink, Tracked, Tracker, chosen
from backlight.session.trackers.metrics import Naming, is_split, point_of_blobs
from backlight.threads import BackgroundThread, running_user_code

if TYPE_CHECKING:
    from backlight.notifier import Notifier
    from backlight.session.settings import Settings

MAX_QUEUED_POINTS = 2048
"""Points that may wait for a slow tracker before the oldest is dropped."""

MOST_UNRECORDED = 100
"""Points of steps that are not recorded between two flushes of the store; of more, evenly spaced ones."""

DELIVERY_PERIOD_S = 1.0
"""Seconds between two deliveries."""

END_TIMEOUT_S = 30.0
"""Seconds that the end of a run waits for its trackers, all of them together."""


class Feed:
    """One tracker with its thread."""

    def __init__(self, tracker: Tracker, target: str, run: Tracked, notifier: Notifier) -> None:
        self.name = tracker.name
        self._tracker, self._target, self._run, self._notifier = tracker, target, run, notifier
        self._active: Any = None
        self._points: deque[Point] = deque(maxlen=MAX_QUEUED_POINTS)
        self._findings: tuple[Sequence[Finding], int] | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._failed = False
        self.dropped = 0
        self._sink: Sink | None = None
        self._thread = BackgroundThread(target=self._work, name=f"backlight-{tracker.name}")

    def connect(self) -> None:
        """Look up what the user has open, on the training thread, and start."""
        try:
            self._active = self._tracker.active()
        except Exception as error:
            if is_interrupt(error):
                raise
            self._left_out(error)
            return
        self._thread.start()

    def take(self, point: Point) -> None:
        """Keep a point until it is sent."""
        if len(self._points) == MAX_QUEUED_POINTS:
            self.dropped += 1
        self._points.append(point)

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Keep findings until they are sent."""
        self._findings = findings, step

    def ask_to_stop(self, *, failed: bool) -> None:
        """Ask the thread to send what is left and to end."""
        self._failed, self._stopping = failed, True
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Wait for the thread, and report what a tracker that does not end in time may lack."""
        if self._thread.ident is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            lack = f"{len(self._points)} steps were not handed over" if self._points else "its end is open"
            reason = f"did not come to an end within {END_TIMEOUT_S:.0f} s; {lack}"
        elif self.dropped:
            reason = f"was too slow: {self.dropped} steps were not sent"
        else:
            return
        self._notifier.warn(f"tracker {self.name}", f"the tracker {self.name!r} {reason}")
        self._notifier.unmeasured(f"tracker {self.name}", reason)

    def _work(self) -> None:
        try:
            with running_user_code():  # libraries log, and so ask for the current thread
                self._sink = self._tracker.open(self._target, self._run, self._active)
            while True:
                self._wake.wait(DELIVERY_PERIOD_S)
                stopping = self._stopping
                with running_user_code():
                    self._send(self._sink)
                if stopping:
                    break
            with running_user_code():
                self._sink.close(failed=self._failed)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - never break the user's training
            self._left_out(error)
            if self._sink is not None:
                with contextlib.suppress(Exception, SystemExit):
                    self._sink.close(failed=self._failed)

    def _send(self, sink: Sink) -> None:
        points = [self._points.popleft() for _ in range(len(self._points))]
        if points:
            sink.send(points)
        entry, self._findings = self._findings, None
        if entry is not None:
            sink.findings(*entry)

    def _left_out(self, error: BaseException) -> None:
        """Report once that this tracker gets nothing more."""
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        if isinstance(error, ModuleNotFoundError) and self._tracker.open.__module__.startswith("backlight."):
            reason += f"; pip install 'backlight[{self.name}]'"
        self._points = deque(maxlen=0)
        self.take = lambda point: None  # type: ignore[method-assign]  # points are dropped from here on
        self._notifier.warn(f"tracker {self.name}", f"the tracker {self.name!r} is left out: {reason}")
        with suppressed():
            self._notifier.unmeasured(f"tracker {self.name}", reason)


class TrackerOutput(Output):
    """Feeds the trackers of one run; on rank 0 only."""

    name = "trackers"
    records = "what trackers get"

    def __init__(self, options: Sequence[str], groups: Mapping[str, str]) -> None:
        self._chosen = options
        self._groups = groups
        self._feeds: list[Feed] = []
        self._naming: tuple[Sequence[ParameterRecord], Naming] | None = None
        self._open_points: dict[int, Point] = {}
        self._unrecorded, self._spacing = 0, 1
        self._all_findings: list[Finding] = []

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor where trackers are named."""
        return cls(settings.trackers, settings.groups) if settings.trackers else None

    def attach(self, run: RunHandle) -> None:
        """Make one feed per tracker."""
        self._run, self._notifier = run, run.notifier
        self._offset = run.writer.step_offset
        tracked = Tracked(run.path.name, run.path, live=True)
        options = self._chosen if run.rank == 0 else ()
        self._feeds = [Feed(*chosen(name), tracked, run.notifier) for name in options]

    def on_step_start(self, step: int) -> None:
        """Connect at the first step."""
        if not step:
            for feed in self._feeds:
                feed.connect()

    def next_step(self, step: int) -> int:
        """Need no start but the first."""
        return NEVER

    def on_step_stored(self, step: StoredStep) -> None:
        """Take what is being stored of a step."""
        if self._feeds:
            naming = self._names(step.parameters)
            at = step.step + self._offset
            point = point_of_blobs(naming, at, step.scalars, step.blobs)
            # Gradients that the last step has left come after its loss.
            before = self._open_points.get(step.step)
            earlier = before.values if before is not None else {}
            self._open_points[step.step] = replace(point, values={**earlier, **point.values})

    def on_step_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take loss, rates and norm of a step that is not recorded; of a fast loop those of some."""
        if self._feeds:
            self._unrecorded += 1
            if step % self._spacing == 0 or not math.isfinite(values.get("loss", 0.0)):
                self._open_points[step] = Point(step + self._offset, clock.unix_time(), dict(values))

    def on_scalars_logged(self, step: int, values: Mapping[str, float]) -> None:
        """Take what the user logged at a step."""
        if not self._feeds:
            return
        point = self._open_points.get(step, Point(step + self._offset, clock.unix_time(), {}))
        logged = {f"user/{name}": value for name, value in values.items()}
        shown = int(values["step"]) if "step" in values else point.step
        self._open_points[step] = replace(point, step=shown, values={**point.values, **logged})

    def on_flush(self) -> None:
        """Release all steps but the last, of which the user may yet log something."""
        self._spacing, self._unrecorded = math.ceil(self._unrecorded / MOST_UNRECORDED) or 1, 0
        if self._open_points:
            self._release(before=max(self._open_points))

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """Send them, and again those that were sent before."""
        self._all_findings = [*self._all_findings, *findings]
        self._send_findings(self._all_findings)

    def on_run_end(self, findings: Sequence[Finding], *, failed: bool) -> None:
        """Send what is left, and the findings; waits for the trackers, up to a limit."""
        self._release(before=None)
        self._send_findings(findings)
        for feed in self._feeds:
            feed.ask_to_stop(failed=failed)
        until = clock.monotonic() + END_TIMEOUT_S
        for feed in self._feeds:
            feed.wait(max(until - clock.monotonic(), 0.0))

    def _send_findings(self, findings: Sequence[Finding]) -> None:
        step = max(self._run.clock.done - 1, 0) + self._offset
        for feed in self._feeds:
            feed.findings(separate_hints(findings)[0], step)

    def _names(self, records: Sequence[ParameterRecord]) -> Naming:
        if self._naming is None or self._naming[0] is not records:
            split = is_split(records)
            if split and self._naming is None:
                self._notifier.unmeasured(
                    "norms for trackers",
                    "this rank holds parts of parameters, and only a reader joins them: "
                    "backlight export RUN --tracker NAME",
                )
            self._naming = records, Naming([r.name for r in records], self._groups, split=split)
        return self._naming[1]

    def _release(self, before: int | None) -> None:
        for step in sorted(self._open_points):
            if before is None or step < before:
                # "step" is the position of the point, not a number to draw.
                point = self._open_points.pop(step)
                values = {name: value for name, value in point.values.items() if name != "user/step"}
                for feed in self._feeds:
                    feed.take(replace(point, values=values))
