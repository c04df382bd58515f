"""Run one case: start it, watch it, and when its time is over collect everything before ending it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backlight.diagnose.matrix import case_run, processes
from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.directory import Attempt
from backlight.diagnose.matrix.edits import apply_edits, export_branch
from backlight.diagnose.matrix.evidence import Collection, collect
from backlight.diagnose.matrix.launch_spec import Launch
from backlight.diagnose.matrix.observations import (
    Ended,
    Missing,
    Observation,
    ProcessSeen,
    Progress,
    StallSeen,
    Window,
)
from backlight.diagnose.matrix.processes import MARK, Process, Tree
from backlight.diagnose.matrix.stacks import traceback_end
from backlight.diagnose.matrix.validation import resolve_branch

MOST_OUTPUT = 64 * 1024 * 1024
"""Bytes of output after which the file starts anew: a case that prints for ever must not fill the disk."""

_POLL = 0.05
_LOOK = 0.5
_TAIL = 15
_LAST_WORDS = 3.0


@dataclass
class _Mark:
    """What is compared at the begin, the middle and the end of the window; ``moment`` since the epoch."""

    time: float
    moment: float
    cpu: dict[tuple[int, int], float]
    delay: dict[tuple[int, int], float]
    output: int
    said: tuple[int, int] = (0, 0)


def run_case(case: Case, attempt: Attempt, *, window: float, grace: float) -> Observation:
    """Run ``case`` in the folder of ``attempt`` and return what was seen; its processes are all gone then.

    Parameters
    ----------
    case:
        What to start.
    attempt:
        The folder that its output and evidence go to.
    window:
        Seconds before the time limit over which CPU time and progress are measured.
    grace:
        Seconds between SIGTERM and SIGKILL.
    """
    launch = case.launch
    begun = time.monotonic()
    mark = uuid.uuid4().hex
    try:
        directory, argv = _prepare(launch, attempt)
        attempt.begin(argv, str(directory), mark)
        process = _start(launch, attempt, argv, directory, mark)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Observation(Ended.NOT_STARTED, time.monotonic() - begun, launch.time_limit, reason=str(error))
    return _Watching(case, attempt, process, Tree(process.pid, mark), window, grace).observe()


def _prepare(launch: Launch, attempt: Attempt) -> tuple[Path, tuple[str, ...]]:
    directory = Path(launch.directory)
    argv = launch.filled(attempt.run, attempt.path)
    if launch.branch:
        commit = resolve_branch(directory, launch.branch)
        # An edited tree belongs to this attempt alone.
        target = attempt.path / "tree" if launch.edits else attempt.root / "trees" / commit
        directory = export_branch(launch, commit, target)
    return directory, apply_edits(launch, argv, directory, attempt.path)


def _start(
    launch: Launch, attempt: Attempt, argv: Sequence[str], directory: Path, mark: str
) -> subprocess.Popen[bytes]:
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ, **launch.environment}
    environment = {k: v for k, v in environment.items() if k not in launch.unset}
    with attempt.stdout.open("ab") as output, attempt.stderr.open("ab") as errors:
        return subprocess.Popen(
            argv, cwd=directory, env={**environment, MARK: mark}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=errors, start_new_session=True,
        )  # fmt: skip


class _Watching:
    def __init__(
        self,
        case: Case,
        attempt: Attempt,
        process: subprocess.Popen[bytes],
        tree: Tree,
        window: float,
        grace: float,
    ) -> None:
        self._case = case
        self._launch = case.launch
        self._attempt = attempt
        self._process = process
        self._tree = tree
        self._window = window
        self._grace = grace
        self._begun = time.monotonic()
        self._arrived: Mapping[str, bool] = {}
        self._dropped = 0
        self._collection = Collection(attempt.path / "evidence", attempt.root)

    def observe(self) -> Observation:
        try:
            return self._observe()
        finally:
            # Whatever happens here, an interrupt included, nothing of the case stays behind.
            self._tree.end(self._grace)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def _observe(self) -> Observation:
        marks: list[_Mark] = []
        for before in (self._window, self._window / 2, 0.0):
            code = self._wait(self._begun + max(self._launch.time_limit - before, 0.0))
            if code is not None:
                return self._exited(code, time.monotonic() - self._begun)
            marks.append(self._mark())
        return self._over(marks, time.monotonic() - self._begun)

    def _wait(self, until: float) -> int | None:
        """Wait for the case to exit, at most until then; its processes are looked at meanwhile."""
        looked = 0.0
        while True:
            code = self._process.poll()
            now = time.monotonic()
            if code is not None or now >= until:
                return code
            if now - looked >= _LOOK:
                looked = now
                self._look()
            time.sleep(min(_POLL, max(until - now, 0.0)))

    def _look(self) -> None:
        alive = self._tree.living()
        self._arrived = arrived(self._launch, alive) or self._arrived
        for path in (self._attempt.stdout, self._attempt.stderr):
            with contextlib.suppress(OSError):
                if (size := path.stat().st_size) > MOST_OUTPUT:
                    os.truncate(path, 0)
                    self._dropped += size

    def _mark(self) -> _Mark:
        alive = self._tree.living()
        cpu = {(p.pid, p.started): p.cpu for p in alive}
        delay = {(p.pid, p.started): processes.delay_of(p.pid) for p in alive}
        output = sum(path.stat().st_size for path in (self._attempt.stdout, self._attempt.stderr))
        said = counted(self._launch.progress, self._text()) if self._launch.progress else (0, 0)
        return _Mark(time.monotonic(), time.time(), cpu, delay, output + self._dropped, said)

    def _progress(self, marks: Sequence[_Mark]) -> Iterator[Progress]:
        if self._launch.progress:
            first, middle, last = (mark.said[0] for mark in marks)
            yield Progress("said in the output", first, middle, last, marks[-1].said[1])
        moments = [mark.moment for mark in marks]
        steps = case_run.steps_at(self._attempt.run, moments) if self._launch.watched else None
        if steps is not None:
            yield Progress("steps recorded in the run", *steps)

    def _over(self, marks: Sequence[_Mark], seconds: float) -> Observation:
        _, middle, last = marks
        alive = self._tree.living(thorough=True)
        spent = max(last.time - middle.time, 1e-3)
        cpu = _rates(middle.cpu, last.cpu, spent)
        delay = _rates(middle.delay, last.delay, spent)
        tail = tuple(self._tail())
        self._collection.keep(
            "tail.txt", "\n".join(tail) + "\n", "end of the output before the case was ended"
        )
        collect(self._collection, alive)
        seen = tuple(_seen(p, cpu, delay) for p in alive)
        stalls = self._stalls()
        ended_by = self._tree.end(self._grace)
        window = Window(
            round(last.time - marks[0].time, 3), round(sum(cpu.values()), 3), last.output - middle.output,
            tuple(self._progress(marks)),
        )  # fmt: skip
        return self._observation(Ended.OVER, seconds, None, window, seen, ended_by, tail, stalls)

    def _exited(self, code: int, seconds: float) -> Observation:
        self._tree.wait_for_watchers(_LAST_WORDS)
        left = self._tree.living(thorough=True)
        if left:
            self._collection.keep(
                "left-behind.txt",
                "".join(f"{p.pid} {' '.join(processes.command_of(p.pid))}\n" for p in left),
                "processes that the case left behind when it exited; they were ended",
            )
        ended_by = self._tree.end(self._grace) if left else ()
        return self._observation(
            Ended.EXITED, seconds, code, None, (), ended_by, tuple(self._tail()), self._stalls()
        )

    def _observation(
        self, ended: Ended, seconds: float, code: int | None, window: Window | None,
        seen: tuple[ProcessSeen, ...], ended_by: tuple[str, ...], tail: tuple[str, ...],
        stalls: tuple[StallSeen, ...],
    ) -> Observation:  # fmt: skip
        text = self._text()
        error, line = traceback_end(text) if code else ("", "")
        if self._dropped:
            self._collection.lacks(
                "the begin of the output", f"{self._dropped:,} bytes were dropped, it passed {MOST_OUTPUT:,}"
            )
        if not processes.available():
            self._collection.lacks("processes and their states", "this system has no /proc")
        if self._launch.watched and not self._attempt.run.is_dir():
            self._collection.missing.append(Missing("the run directory", "the case wrote none"))
        success = bool(re.search(self._launch.success, text, re.MULTILINE)) if self._launch.success else None
        return Observation(
            ended, round(seconds, 3), self._launch.time_limit, code, success=success,
            window=window, processes=seen, stacks=tuple(self._collection.stacks), stalls=stalls,
            error=error, error_line=line, tail=tail,
            files=(*self._attempt.outputs(), *self._collection.kept), missing=tuple(self._collection.missing),
            ended_by=ended_by, arrived=self._arrived,
        )  # fmt: skip

    def _stalls(self) -> tuple[StallSeen, ...]:
        """Read what the sidecar has found; ending the case makes findings of its own."""
        return case_run.stalls_of(self._attempt.run, self._attempt.root)

    def _text(self) -> str:
        return "\n".join(_read(path) for path in (self._attempt.stdout, self._attempt.stderr))

    def _tail(self) -> Iterator[str]:
        for path in (self._attempt.stdout, self._attempt.stderr):
            for line in _read(path).splitlines()[-_TAIL:]:
                yield f"{path.stem}: {line[:500]}"


def counted(pattern: str, text: str) -> tuple[int, int]:
    """Return how far a case says it is and how far it has to go (0 where it does not say).

    The first group of ``pattern`` is where it is and the second where it ends, in the last match; a
    pattern without groups, or with words in them, is counted.
    """
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    if not matches:
        return 0, 0
    groups = [group or "" for group in matches[-1].groups()]
    done = int(groups[0]) if groups and groups[0].isdecimal() else len(matches)
    return done, int(groups[1]) if len(groups) > 1 and groups[1].isdecimal() else 0


def arrived(launch: Launch, alive: Sequence[Process]) -> Mapping[str, bool]:
    """Tell which variables of the launch the innermost processes of the case really have.

    A shell or a launcher in between may drop them. Empty where no environment can be read.
    """
    parents = {p.parent for p in alive}
    found = [e for p in alive if p.pid not in parents and (e := processes.environment_of(p.pid))]
    if not found:
        return {}
    given = {f"environment {n}": any(e.get(n) == v for e in found) for n, v in launch.environment.items()}
    return given | {f"environment {n}": any(n not in e for e in found) for n in launch.unset}


_Rates = Mapping[tuple[int, int], float]


def _rates(before: _Rates, after: _Rates, seconds: float) -> dict[tuple[int, int], float]:
    return {key: max(total - before.get(key, 0.0), 0.0) / seconds for key, total in after.items()}


def _seen(process: Process, cpu: _Rates, delay: _Rates) -> ProcessSeen:
    key = (process.pid, process.started)
    command = " ".join(processes.command_of(process.pid)) or process.name
    waits = processes.waits_of(process.pid)
    return ProcessSeen(
        process.pid, process.parent, command, process.state, process.threads,
        round(cpu.get(key, 0.0), 3), round(delay.get(key, 0.0), 3), waits,
    )  # fmt: skip


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(2 * MOST_OUTPUT).decode(errors="replace")
    except OSError:
        return ""
