"""Live runs, read again when they grow and rendered when a page requests it, alone or overlaid.

One thread reads, evaluates and scores, and rests after that, altogether while no one looks; another one
reduces the series of all parameters where that takes long. What the screen shows is rendered when it is
asked for, panel by panel, from the same panels as the report's.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from backlight.answer import Table, indexed
from backlight.findings.losses import losses_of
from backlight.records import Finding, ParameterRecord, RunStatus
from backlight.report import verdict
from backlight.report.overlay import compared, curve_panels, left_out, listing
from backlight.report.page import announced, belongs, head, panel_data
from backlight.report.page_codec import script_json
from backlight.report.panel import Drawn, NotMeasured, Panel, error_text, failed, in_order, shown
from backlight.report.source import ParameterFrames, Source
from backlight.store.errors import RunFormatError
from backlight.store.read.run import Run
from backlight.text import count, duration, number, visible
from backlight.threads import BackgroundThread

POLL_INTERVAL_S = 0.3
"""Time between two checks of the files of a run."""

REST_FACTOR = 0.5
"""Rest after a reading, as a multiple of what the reading took."""

MAX_REST_S = 0.5
"""Longest rest: a finding must not wait for long."""

REDUCTION_REST_FACTOR = 4.0
"""Rest between two reductions of all parameters, as a multiple of what one takes."""

QUICK_REDUCTION_S = 0.25
"""Time up to which findings wait for the reduction of all parameters."""

IDLE_TIMEOUT_S = 30.0
"""Time without a request after which no page is taken to be open."""

LIVENESS_INTERVAL_S = 2.0
"""Time between two checks of whether the writer still runs, where its files have not changed."""

READ_ONCE = frozenset(name for name, member in vars(Source).items() if isinstance(member, cached_property))
"""What a source remembers of its run; none of it depends on the findings."""

WRITTEN = verdict.STATUS[RunStatus.RUNNING]
"""What a written report says of a run that goes on; here the standing says it."""


class Standing(enum.StrEnum):
    """What a live view says of a run, in one word; of several runs, the first here that one of them has."""

    READING = "reading"
    RUNNING = "running"
    WAITING = "waiting"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"
    KILLED = "killed"
    FAILED = "failed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Stand:
    """The standing, and the sentence that says what it does not say by itself."""

    word: Standing
    detail: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will come, so that no one needs to ask again."""
        return self.word in {Standing.FINISHED, Standing.FAILED}

    def as_json(self) -> dict[str, Any]:
        """Return what a page is sent."""
        return {"word": self.word.value, "detail": self.detail, "over": self.over}


READING = Stand(Standing.READING, "The run is being read.")
EMPTY = Stand(Standing.WAITING, "Waiting for the first step: no run began in this folder yet.")


def stand_of(run: Run) -> Stand:
    """Return the state of ``run`` by the status of its newest attempt."""
    last = run.last_step()
    steps = "no step was taken" if last < 0 else f"the last step is {number(last)}"
    status = run.status
    if status is RunStatus.RUNNING:
        if last < 0:
            return Stand(
                Standing.WAITING, "Waiting for the first step: the run began, nothing is recorded yet."
            )
        return Stand(Standing.RUNNING, f"The training runs; {steps}.")
    if status is RunStatus.KILLED:
        return Stand(Standing.KILLED, f"The process ended without closing the run; {steps}.")
    if status is RunStatus.UNKNOWN:
        return Stand(Standing.UNKNOWN, f"Nothing was heard of the writer for a while; {steps}.")
    if status is RunStatus.FAILED:
        return Stand(Standing.FAILED, f"{verdict.ending(run)}; {steps}.")
    return Stand(Standing.FINISHED, f"The training ended; {steps}.")


Evaluate = Callable[[Run], Sequence[Finding]]
"""Says what the rules find in a run."""

Gather = Callable[[Run, Sequence[Finding]], Source]
"""Scores a run that was evaluated: what a report shows of it."""

Reopen = Callable[[Path], Run]
"""Opens the run as it stands now."""


@dataclass(slots=True)
class Rendered:
    """A panel as it was rendered last, for which version of the run, and what that took."""

    panel: Panel
    result: Drawn | NotMeasured
    version: int


class FollowedRun:
    """A run directory, which may still be empty, the newest reading of it, and its panels.

    ``reopen`` opens it; one that remembers what it read makes each reading cheap.
    """

    def __init__(self, path: Path, evaluate: Evaluate, gather: Gather, reopen: Reopen) -> None:
        self.path = path
        self.name = path.resolve().name
        self.version = 0
        self.stand = READING
        self.source: Source | None = None
        self._evaluate = evaluate
        self._gather = gather
        self._reopen = reopen
        self._lock = threading.RLock()
        self._rendered: dict[str, Rendered] = {}
        self._head: tuple[int, dict[str, Any]] | None = None
        self._frames: tuple[ParameterFrames | None, tuple[ParameterRecord, ...], float, float]
        self._frames = (None, (), 0, 0)
        self._behind = False
        self._files: frozenset[tuple[str, int, int]] | None = None
        self._looked = 0.0
        self._rest_until = 0.0
        self._asked = time.monotonic()
        self._closed = threading.Event()
        self._wanted = threading.Event()
        self._threads: list[BackgroundThread] = []

    def start(self) -> None:
        """Follow the run in threads of its own until :meth:`close`."""
        jobs = {"follow": self._follow, "reduce": self._reduce_late}
        self._threads = [
            BackgroundThread(target=job, name=f"{what} {self.name}") for what, job in jobs.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop following."""
        self._closed.set()
        self._wanted.set()
        for thread in self._threads:
            thread.join(timeout=2)

    def touch(self) -> None:
        """Record that a page is open."""
        self._asked = time.monotonic()
        self._wanted.set()

    def look(self) -> bool:
        """Read the run again if anything changed; return whether there is a new version."""
        files = frozenset(_files(self.path))
        now = time.monotonic()
        if files == self._files and not self._may_have_died(now):
            return False
        self._looked = now
        # Without the lock: a request in the meantime gets what was read before.
        stand, source = self._read()
        if files == self._files and stand == self.stand:
            return False
        drawn = self._undrawn(source)
        with self._lock:
            self._files = files
            self.stand = stand
            self.source = source or self.source
            self.version += 1
            for panel, result in drawn:
                self._rendered[panel.name] = Rendered(panel, result, self.version)
        self._rest_until = time.monotonic() + min(MAX_REST_S, REST_FACTOR * (time.monotonic() - now))
        return True

    def _may_have_died(self, now: float) -> bool:
        return (
            self.stand.word in {Standing.RUNNING, Standing.WAITING}
            and now - self._looked > LIVENESS_INTERVAL_S
        )

    def _read(self) -> tuple[Stand, Source | None]:
        if not any(True for _ in _files(self.path)):
            return EMPTY, None
        try:
            run = self._reopen(self.path)
            stand = stand_of(run)
            findings = tuple(self._evaluate(run))
            self._tell(findings)
            source = self._gather(run, findings)
            self._keep_frames(source)
        except (RunFormatError, OSError) as error:
            # A run that was never read may be half created; one that was read stays on the screen.
            return Stand(Standing.UNREADABLE, visible(str(error))), None
        except Exception as error:  # noqa: BLE001 - what breaks must be on the page, not end the thread silently
            return Stand(Standing.UNREADABLE, f"Reading it failed: {error_text(error)}"), None
        return stand, source

    def _tell(self, findings: tuple[Finding, ...]) -> None:
        """Show new findings at once: of a long run there is more to read."""
        if self.source is None or findings == (*self.source.findings, *self.source.hints):
            return
        state = dataclasses.replace(self.source, findings=findings)
        for name in READ_ONCE & self.source.__dict__.keys():  # of the same run, so not read again
            setattr(state, name, getattr(self.source, name))
        state.kept = self.source.kept
        with self._lock:
            self.source = state
            self.version += 1

    def _keep_frames(self, source: Source) -> None:
        """Reduce the series of all parameters again where that is quick; else it is done later."""
        frames, parameters, _, cost = self._frames
        self._behind = frames is not None and parameters == source.parameters and cost > QUICK_REDUCTION_S
        if frames is not None and self._behind:
            source.frames = frames
        else:
            self._reduce(source)

    def catch_up(self) -> bool:
        """Reduce what findings did not wait for; return whether there is a new version."""
        _, _, at, cost = self._frames
        if not self._behind or self.source is None or time.monotonic() - at < REDUCTION_REST_FACTOR * cost:
            return False
        try:
            # A reading of its own: the one that is shown may be read from meanwhile.
            newest = dataclasses.replace(self.source, run=self._reopen(self.path))
            self._reduce(newest)
        except (RunFormatError, OSError):
            return False  # said by the next look
        except Exception:
            self._behind = False  # not again before there is more to read
            raise
        with self._lock:
            if newest.parameters == self.source.parameters:
                self.source.frames = newest.frames  # also where it was read again meanwhile
                self._behind = False
                self.version += 1
        return True

    def _reduce(self, source: Source) -> None:
        begun = time.monotonic()
        frames = source.frames
        now = time.monotonic()
        self._frames = (frames, source.parameters, now, now - begun)

    def _undrawn(self, source: Source | None) -> list[tuple[Panel, Drawn | NotMeasured]]:
        """Render panels that had no data so far; panels already drawn wait for a request."""
        if source is None:
            return []
        results = {name: rendered.result for name, rendered in list(self._rendered.items())}
        wanted = [panel for panel in in_order() if not isinstance(results.get(panel.name), Drawn)]
        return [(panel, shown(panel, source)) for panel in wanted]

    def head(self) -> dict[str, Any]:
        """Return everything that the page shows next to the data of its panels, as JSON types."""
        with self._lock:
            if self._head is not None and self._head[0] == self.version:
                return self._head[1]
            state: dict[str, Any] = {"news": self.version, "stand": self.stand.as_json()}
            if self.source is not None and self.stand.word is not Standing.WAITING:
                try:
                    state |= self._shown(self.source)
                except Exception as error:  # noqa: BLE001 - an answer that says so, instead of none
                    detail = f"Showing it failed: {error_text(error)}"
                    state["stand"] |= {"word": Standing.UNREADABLE.value, "detail": detail}
            self._head = (self.version, state)
            return state

    def _shown(self, source: Source) -> dict[str, Any]:
        """Return what the page shows of a run that was read."""
        drawn = [
            (rendered.panel, rendered.result)
            for panel in in_order()
            if (rendered := self._rendered[panel.name]) and belongs(panel, rendered.result, source)
        ]
        state = head(source, drawn)
        words = state["verdict"]["status"].split(verdict.PARTED)
        state["verdict"]["status"] = verdict.PARTED.join(w for w in words if w != WRITTEN)
        state["panels"] = [announced(panel, result) for panel, result in drawn]
        state["table"] = hashlib.sha256(script_json(state["parameters"]).encode("ascii")).hexdigest()[:20]
        return state

    def panel(
        self, name: str, *, have: str = "", column: str = "", between: tuple[int, int] | None = None
    ) -> tuple[str, str] | None:
        """Return a stamp of a panel and its content as JSON, or None where ``have`` is that stamp.

        ``column`` is the one column of the heat map whose values are wanted, ``between`` the first and the
        last step that it is to show, so that these are shown more closely; None for the whole run.

        Raises
        ------
        KeyError
            If there is no such panel, or nothing was read yet.
        """
        with self._lock:
            rendered = self._rendered[name]
            if rendered.version != self.version and self.source is not None:
                rendered = Rendered(rendered.panel, shown(rendered.panel, self.source), self.version)
                self._rendered[name] = rendered
            result = rendered.result
            closely = isinstance(result, Drawn) and result.kind == "parameters" and between is not None
            if closely and between is not None and self.source is not None:
                result = shown(rendered.panel, dataclasses.replace(self.source, window=between))
        try:
            content = panel_data(rendered.panel, result)
            if content.get("kind") == "parameters":
                content["data"] = {**_one_column(content["data"], column), "window": closely}
            text = script_json(content)
        except Exception as error:  # noqa: BLE001 - a third-party panel may raise anything
            failure = failed(rendered.panel, error)
            text = script_json(panel_data(rendered.panel, failure))
            with self._lock:
                if self._rendered[name] is rendered:
                    self._rendered[name] = Rendered(rendered.panel, failure, rendered.version)
                    self.version += 1
        stamp = hashlib.sha256(text.encode("ascii")).hexdigest()[:20]
        return None if stamp == have else (stamp, text)

    def _follow(self) -> None:
        while not self._closed.is_set():
            if time.monotonic() - self._asked > IDLE_TIMEOUT_S:
                self._wanted.clear()
                if time.monotonic() - self._asked > IDLE_TIMEOUT_S:
                    self._wanted.wait()
                continue
            self._unharmed("Following", self.look)
            self._closed.wait(max(POLL_INTERVAL_S, self._rest_until - time.monotonic()))

    def _reduce_late(self) -> None:
        while not self._closed.wait(POLL_INTERVAL_S):
            self._unharmed("Reducing", self.catch_up)

    def _unharmed(self, what: str, job: Callable[[], bool]) -> None:
        """Do a job of a thread; what breaks stands on the page, and the thread goes on."""
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a page that no thread follows any more would look alive
            stand = Stand(Standing.UNREADABLE, f"{what} the run failed: {error_text(error)}")
            with self._lock:
                self.version += stand != self.stand
                self.stand = stand
            if job == self.look:
                self._files = None  # to be read again, changed or not
            self._rest_until = time.monotonic() + MAX_REST_S


def _one_column(data: dict[str, Any], wanted: str) -> dict[str, Any]:
    """Return the data of the heat map with the values of one column; the others are named."""
    names = [column["name"] for column in data["columns"]]
    chosen = wanted if wanted in names else names[0]
    return {
        **data,
        "columns": [
            column if column["name"] == chosen else {**column, "high": None, "low": None}
            for column in data["columns"]
        ],
    }


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield what tells whether a run changed: its files with time and size."""
    try:
        with os.scandir(path) as listing:
            entries = list(listing)
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir() and (entry.name.startswith("attempt-") or entry.name == "arrays"):
                yield from _files(Path(entry.path))
            elif entry.is_file() and not entry.name.endswith("-shm"):
                state = entry.stat()
                yield entry.path, state.st_mtime_ns, state.st_size
        except OSError:
            continue  # renamed or removed just now


# Several followed runs overlaid: a table, and a chart for each number that one of them has.


HEADS = ("run", "now", "steps", "last loss", "median step", "findings")


class Several:
    """A page over ``runs``; what each of them shows alone is a page of its own."""

    def __init__(self, runs: Sequence[FollowedRun]) -> None:
        self._runs = tuple(runs)
        self.name = f"{len(self._runs)} runs"
        self._names = _distinct_names([run.name for run in self._runs])
        self._drawn: tuple[int, dict[str, dict[str, Any]]] | None = None

    @property
    def version(self) -> int:
        """Return a number that grows with every news of any run."""
        return sum(run.version for run in self._runs)

    def touch(self) -> None:
        """Record for each run that a page is open."""
        for run in self._runs:
            run.touch()

    def head(self) -> dict[str, Any]:
        """Return everything that the page shows next to the data of its panels, as JSON types."""
        version = self.version
        panels = self._panels(version)
        state: dict[str, Any] = {"news": version, "stand": self._stand().as_json()}
        if not panels:
            return state
        findings = sum(len(source.findings) for _, _, source in self._read())
        detail = f"{count(findings, 'finding')} in all; each run has a page of its own above."
        announced = ("name", "title", "note", "place", "kind", "stated")
        shown = [{key: panel[key] for key in announced if key in panel} for panel in panels.values()]
        last = max(source.step_range[1] for _, _, source in self._read())
        several = compared(self.name, len(self._runs), detail, steps=(0, last))
        return state | several | {"table": "", "panels": shown}

    def panel(
        self, name: str, *, have: str = "", column: str = "", between: tuple[int, int] | None = None
    ) -> tuple[str, str] | None:
        """Return stamp and JSON of a panel, None where ``have`` is that stamp; KeyError for no panel."""
        text = script_json(self._panels(self.version)[name])
        stamp = hashlib.sha256(text.encode("ascii")).hexdigest()[:20]
        return None if stamp == have else (stamp, text)

    def _read(self) -> Iterator[tuple[str, FollowedRun, Source]]:
        for name, run in zip(self._names, self._runs, strict=True):
            source = run.source
            if source is not None:
                yield name, run, source

    def _stand(self) -> Stand:
        words = [run.stand.word for run in self._runs]
        for word in Standing:
            if word in words and word is not Standing.FINISHED:
                amount = words.count(word)
                return Stand(word, f"{amount} of {count(len(words), 'run')}: {word.value}.")
        return Stand(Standing.FINISHED, "All of these runs ended.")

    def _panels(self, version: int) -> dict[str, dict[str, Any]]:
        if self._drawn is None or self._drawn[0] != version:
            read = [(name, run, source) for name, run, source in self._read()]
            self._drawn = (version, {panel["name"]: panel for panel in _drawn(read)} if read else {})
        return self._drawn[1]


def _drawn(read: Sequence[tuple[str, FollowedRun, Source]]) -> Iterator[dict[str, Any]]:
    """Yield the table of the runs and their charts; what fails is named in its place, and the rest stays."""
    rows = [_row(name, run, source) for name, run, source in read]
    table = Table(indexed(HEADS, numbers=(2, 3, 4)), rows, title="Runs")
    yield listing(table, remarks=left_out(len(read)))
    yield from curve_panels([(name, source) for name, _, source in read])


def _row(name: str, run: FollowedRun, source: Source) -> list[str]:
    try:
        losses, seconds = losses_of(source.run), source.step_times
        lasts = [(label, number(float(loss.values[-1]))) for label, loss in losses.items()]
        named = [value if label == "loss" else f"{value} ({visible(label)})" for label, value in lasts]
        return [
            name,
            run.stand.word.value,
            number(source.run.last_step() + 1),
            ", ".join(named) or "not measured",
            duration(float(np.median(seconds))) if len(seconds) else "not measured",
            verdict.tally(source.findings) or "none",
        ]
    except Exception as error:  # noqa: BLE001 - one run must not take the others with it
        return [name, run.stand.word.value, "", "", "", f"could not be read: {error_text(error).rstrip('.')}"]


def _distinct_names(names: Sequence[str]) -> list[str]:
    """Return names that differ: a number goes behind those that stand twice."""
    out: list[str] = []
    for name in names:
        wanted, amount = visible(name), 2
        while wanted in out:
            wanted, amount = f"{visible(name)} ({amount})", amount + 1
        out.append(wanted)
    return out
