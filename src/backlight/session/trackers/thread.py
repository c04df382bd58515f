"""A live training's numbers on their way to trackers: off the step's path, one thread for each tracker.

The thread that writes the run hands over what it has just stored. A tracker that is slow loses the oldest
points; one that raises is named once and left out. The training never waits for one.

What the thread that stores is alarmed about (a gradient that is not finite, a spike) is judged at once by the
rule of that name, on one more thread, so that the finding is sent while the training runs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from backlight.findings.evaluate import evaluate_rules
from backlight.records import Finding, Made, ParameterRecord
from backlight.registry import RULES
from backlight.session.trackers.base import Point, Sink, Tracked, Tracker, chosen
from backlight.session.trackers.metrics import Naming, is_split, point_of_blobs
from backlight.store.read.run import open_run

if TYPE_CHECKING:
    from backlight.notifier import Notifier
    from backlight.session.settings import Settings
    from backlight.store.write.writer import RunWriter

WAITING = 2048
"""Points that may wait for a slow tracker before the oldest is dropped."""

INTERVAL = 1.0
"""Seconds between two deliveries."""

PATIENCE = 30.0
"""Seconds that the end of a training waits for its trackers, all of them together."""

REST = 100.0
"""Times what a judgement took that pass before the next: a hundredth of the time goes into it."""


class Feed:
    """One tracker with its thread."""

    def __init__(self, tracker: Tracker, target: str, run: Tracked, notifier: Notifier) -> None:
        self.name = tracker.name
        self._tracker, self._target, self._run, self._notifier = tracker, target, run, notifier
        self._active: Any = None
        self._points: deque[Point] = deque(maxlen=WAITING)
        self._findings: tuple[Sequence[Finding], int] | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._failed = False
        self.dropped = 0
        self._sink: Sink | None = None
        self._thread = threading.Thread(target=self._work, name=f"backlight-{tracker.name}", daemon=True)

    def meet(self) -> None:
        """Look for what the user has open, on their thread, and begin."""
        try:
            self._active = self._tracker.active()
        except Exception as error:  # noqa: BLE001 - third-party code; never break the user's training
            self._left_out(error)
            return
        self._thread.start()

    def take(self, point: Point) -> None:
        """Keep a point until it is sent."""
        if len(self._points) == WAITING:
            self.dropped += 1
        self._points.append(point)

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        """Keep what the rules say until it is sent."""
        self._findings = findings, step

    def ask_to_stop(self, *, failed: bool) -> None:
        """Let the thread send what is left and end."""
        self._failed, self._stopping = failed, True
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Wait for the thread, and say what a tracker that does not come to an end may lack."""
        if self._thread.ident is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            lack = f"{len(self._points)} steps were not handed over" if self._points else "its end is open"
            reason = f"did not come to an end within {PATIENCE:.0f} s; {lack}"
        elif self.dropped:
            reason = f"was too slow: {self.dropped} steps were not sent"
        else:
            return
        self._notifier.warn(f"tracker {self.name}", f"the tracker {self.name!r} {reason}")
        self._notifier.unmeasured(f"tracker {self.name}", reason)

    def _work(self) -> None:
        try:
            self._sink = self._tracker.open(self._target, self._run, self._active)
            while True:
                self._wake.wait(INTERVAL)
                stopping = self._stopping
                self._send(self._sink)
                if stopping:
                    break
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
        found, self._findings = self._findings, None
        if found is not None:
            sink.findings(*found)

    def _left_out(self, error: BaseException) -> None:
        """Say once that this tracker gets nothing more."""
        said = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {said[0] if said else 'no message'}"
        if isinstance(error, ModuleNotFoundError) and self._tracker.open.__module__.startswith("backlight."):
            reason += f"; pip install 'backlight[{self.name}]'"
        self._points = deque(maxlen=0)
        self.take = lambda point: None  # type: ignore[method-assign]  # nobody takes points from here on
        self._notifier.warn(f"tracker {self.name}", f"the tracker {self.name!r} is left out: {reason}")
        with contextlib.suppress(Exception):
            self._notifier.unmeasured(f"tracker {self.name}", reason)


class Tracking:
    """The trackers of one watch; none where none was asked for, and on every rank but the first.

    Parameters
    ----------
    settings:
        Names the trackers and the groups of parameters.
    writer:
        The run that is tracked.
    notifier:
        Where trouble is told.
    """

    def __init__(self, settings: Settings, writer: RunWriter, notifier: Notifier) -> None:
        run = Tracked(writer.path.name, writer.path, live=True)
        given = settings.trackers if writer.rank == 0 else ()
        self._feeds = [Feed(*chosen(name), run, notifier) for name in given]
        self._offset = writer.step_offset
        self._groups = settings.groups
        self._notifier = notifier
        self._naming: tuple[Sequence[ParameterRecord], Naming] | None = None
        self._held: dict[int, Point] = {}
        self._met = False
        self._path = writer.path
        self._alarms: dict[str, int] = {}
        self._told: dict[str, list[Finding]] = {}
        self._judging: threading.Thread | None = None
        self._resting = 0.0
        self._ended = False
        self._lock = threading.Lock()

    def meet(self) -> None:
        """Begin, at the first recorded step; called on the training's thread."""
        if not self._met:
            self._met = True
            for feed in self._feeds:
                feed.meet()

    def stored(
        self, step: int, records: Sequence[ParameterRecord], scalars: Mapping[str, float], blobs: Any
    ) -> None:
        """Take what was just stored of a step; called, as the next two, on the thread that stores."""
        if not self._feeds:
            return
        point = point_of_blobs(self._names(records), step + self._offset, scalars, blobs)
        self._held[step] = point

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Take what the user logged at a step."""
        if not self._feeds:
            return
        held = self._held.get(step, Point(step + self._offset, time.time(), {}))
        own = {f"user/{name}": value for name, value in values.items()}
        shown = int(values["step"]) if "step" in values else held.step
        self._held[step] = replace(held, step=shown, values={**held.values, **own})

    def release(self) -> None:
        """Let all steps go but the last, of which the user may yet log something."""
        if self._held:
            self._release(before=max(self._held))

    def alarmed(self, step: int, cause: str) -> None:
        """Note what is to be judged once it is stored; called, as the next, on the thread that stores."""
        if self._feeds and cause in RULES:
            self._alarms[cause] = step

    def flushed(self) -> None:
        """Judge what was alarming, now that a reader can see it; on a thread of its own."""
        busy = self._judging is not None and self._judging.is_alive()
        if self._alarms and not busy and time.monotonic() >= self._resting:
            alarms, self._alarms = self._alarms, {}
            self._judging = threading.Thread(
                target=self._judge, args=(alarms,), name="backlight-judge", daemon=True
            )
            self._judging.start()

    def _judge(self, alarms: Mapping[str, int]) -> None:
        """Send what the rules of ``alarms`` say; each later sending repeats what was said before it."""
        begin = time.monotonic()
        try:
            fresh = evaluate_rules(open_run(self._path), made=Made.LIVE, only=alarms)
        except Exception as error:  # noqa: BLE001 - never break the user's training
            self._notifier.trouble(error, "findings for trackers before the training ends")
            return
        self._resting = time.monotonic() + REST * (time.monotonic() - begin)
        before = _subjects(self._told)
        self._told |= {rule: [f for f in fresh if f.rule == rule] for rule in alarms}
        told = [finding for findings in self._told.values() for finding in findings]
        with self._lock:
            if not self._ended and _subjects(self._told) != before:
                for feed in self._feeds:
                    feed.findings(told, max(alarms.values()) + self._offset)

    def end(self, findings: Sequence[Finding], step: int, *, failed: bool) -> None:
        """Send what is left, and what the rules say; waits for the trackers, but not for ever."""
        with self._lock:
            self._ended = True
        with self._notifier.shield():
            self._release(before=None)
            for feed in self._feeds:
                feed.findings(findings, max(step, 0) + self._offset)
                feed.ask_to_stop(failed=failed)
            until = time.monotonic() + PATIENCE
            for feed in self._feeds:
                feed.wait(max(until - time.monotonic(), 0.0))

    def _names(self, records: Sequence[ParameterRecord]) -> Naming:
        if self._naming is None or self._naming[0] is not records:
            split = is_split(records)
            if split and self._naming is None:
                self._notifier.unmeasured(
                    "norms for trackers",
                    "this rank holds parts of parameters, and only a reader joins them: "
                    "backlight export RUN --to TRACKER",
                )
            self._naming = records, Naming([r.name for r in records], self._groups, split=split)
        return self._naming[1]

    def _release(self, before: int | None) -> None:
        for step in sorted(self._held):
            if before is None or step < before:
                # "step" is where the point stands, not a number to draw.
                point = self._held.pop(step)
                values = {name: value for name, value in point.values.items() if name != "user/step"}
                for feed in self._feeds:
                    feed.take(replace(point, values=values))


def _subjects(told: Mapping[str, Sequence[Finding]]) -> list[tuple[str, Any]]:
    return [(rule, finding.subject) for rule, findings in told.items() for finding in findings]
