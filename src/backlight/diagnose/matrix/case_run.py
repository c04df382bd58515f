"""Run one case: start it, sample it, and collect all evidence before its processes are ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backlight import processes
from backlight.diagnose.matrix.case_files import prepare_files
from backlight.diagnose.matrix.cases import Case, fill
from backlight.diagnose.matrix.observation import (
    Observation,
    ProcessSample,
    Progress,
    count_progress,
    last_error,
    read_stalls,
    steps_at,
)
from backlight.launch import subprocess as tree
from backlight.monitors.stalls.model import stacks
from backlight.monitors.stalls.model.attach import Attached, ProcessNotFoundError, attach
from backlight.processes import Process
from backlight.store.platform.atomic_json import write_document

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""Output after which its file is truncated: a case that prints without end must not fill the disk."""

ATTACH_S = 1.0
WATCHDOG_TIMEOUT_S = 3.0
TAIL_LINES = 15
_POLL_S, _SAMPLE_S = 0.05, 0.5
_FILES = {"start.json": "command", "run": "run directory", "stdout.txt": "output", "stderr.txt": "errors"}


def run_case(case: Case, attempt: Path, *, window: float, grace: float) -> Observation:
    """Run ``case`` in a directory of its own and return what was observed; none of its processes is left.

    ``window`` are the seconds before the time limit over which CPU time and progress are measured, ``grace``
    those between SIGTERM and SIGKILL.
    """
    mark, begin = uuid.uuid4().hex, time.monotonic()
    try:
        values = {"run": str(attempt / "run"), "case": str(attempt)}
        directory, argv = prepare_files(case, [fill(part, values) for part in case.argv], attempt)
        start = {"argv": argv, "directory": str(directory), "mark": mark, "time": time.time()}
        write_document(attempt / "start.json", start)
        environment = case.variables({"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ})
        with (attempt / "stdout.txt").open("ab") as out, (attempt / "stderr.txt").open("ab") as errors:
            process = tree.start(argv, directory, environment, mark, out, errors)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        seconds = time.monotonic() - begin
        return Observation(seconds, case.time_limit, problem=str(error), digest=case.digest)
    started = tree.ProcessTree(process.pid, mark)
    try:
        observed = _CaseRun(case, attempt, process, started, begin).observe(window, grace)
        return replace(observed, argv=tuple(argv), digest=case.digest)
    finally:
        # Also after an interrupt, nothing of the case is left running.
        started.end(grace)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


@dataclass(frozen=True)
class _Mark:
    """Counters at one moment of the window; ``clock`` is in seconds since the epoch."""

    time: float
    clock: float
    used: dict[int, tuple[float, float]]
    output: int
    counted: tuple[int, int]


@dataclass
class _CaseRun:
    case: Case
    attempt: Path
    process: subprocess.Popen[bytes]
    tree: tree.ProcessTree
    begin: float
    arrived: dict[str, bool] = field(default_factory=dict)
    dropped: int = 0
    files: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = self.attempt / "stdout.txt", self.attempt / "stderr.txt"

    def observe(self, window: float, grace: float) -> Observation:
        marks: list[_Mark] = []
        for remaining in (window, window / 2, 0.0):
            code = self._wait(self.begin + max(self.case.time_limit - remaining, 0.0))
            if code is not None:
                break
            marks.append(self._mark())
        seconds = round(time.monotonic() - self.begin, 3)
        tail, sampled = self._tail(), {}
        if code is None:
            self._keep("tail.txt", "\n".join(tail), "end of the output before the case was ended")
            sampled = self._sample_window(*marks)
        else:
            self.tree.wait_for_watchdogs(WATCHDOG_TIMEOUT_S)
            if left := [f"{process.pid} {_command(process)}" for process in self.tree.find()]:
                self._keep("left-behind.txt", "\n".join(left), "processes that the case left running")
        # Before the processes are ended: their deaths are no findings of the run.
        stalls, resumed = read_stalls(self.attempt / "run")
        ended_by, text = self.tree.end(grace), self._text()
        error, line = last_error(text) if code else ("", "")
        if self.dropped:
            self.missing.append(f"the begin of the output: {self.dropped:,} bytes were dropped")
        if self.case.watched and not (self.attempt / "run").is_dir():
            self.missing.append("the run directory: the case wrote none")
        success = bool(re.search(self.case.success, text, re.MULTILINE)) if self.case.success else None
        files = {name: what for name, what in _FILES.items() if (self.attempt / name).exists()}
        return Observation(
            seconds, self.case.time_limit, code, success=success, stalls=stalls, resumed=resumed, error=error,
            error_line=line, tail=tail, files=files | self.files, missing=tuple(dict.fromkeys(self.missing)),
            ended_by=ended_by, arrived=self.arrived, **sampled,
        )  # fmt: skip

    def _wait(self, until: float) -> int | None:
        sampled = 0.0
        while (code := self.process.poll()) is None and (now := time.monotonic()) < until:
            if now - sampled >= _SAMPLE_S:
                sampled = now
                # Also remembers processes that leave the session of a parent that ends.
                self.arrived = arrived(self.case, self.tree.find()) or self.arrived
                for path in self.outputs:
                    if (size := path.stat().st_size) > MAX_OUTPUT_BYTES:
                        os.truncate(path, 0)
                        self.dropped += size
            time.sleep(min(_POLL_S, max(until - now, 0.0)))
        return code

    def _mark(self) -> _Mark:
        used = {}
        for process in self.tree.find():
            queued = sum(thread.queued_ns for thread in processes.read_threads(process.pid))
            used[process.pid] = process.cpu_s, queued / 1e9
        output = sum(path.stat().st_size for path in self.outputs) + self.dropped
        counted = count_progress(self.case.progress, self._text())
        return _Mark(time.monotonic(), time.time(), used, output, counted)

    def _sample_window(self, first: _Mark, middle: _Mark, last: _Mark) -> dict[str, Any]:
        return {
            "processes": tuple(self._sample(middle, last)),
            "window_s": round(last.time - first.time, 3),
            "output_bytes": last.output - middle.output,
            "progress": tuple(self._progress(first, middle, last)),
        }

    def _sample(self, middle: _Mark, last: _Mark) -> Iterator[ProcessSample]:
        """Record the kernel's view of every process, then attach to each Python process."""
        alive = [process for process in self.tree.find() if not tree.is_watchdog(process.pid)]
        parents = {process.parent for process in processes.read_process_table().values()}
        commands = {process.pid: _command(process) for process in alive}
        listed = [f"{pid} {command}\n{processes.format_threads(pid)}" for pid, command in commands.items()]
        what = "processes of the case, with state, wait and CPU time of each thread"
        self._keep("processes.txt", "\n\n".join(listed), what)
        with ThreadPoolExecutor(8) as pool:
            attached = list(pool.map(self._attach, commands))
        seconds = max(last.time - middle.time, 1e-3)
        for (pid, command), found in zip(commands.items(), attached, strict=True):
            pair = middle.used.get(pid, (0.0, 0.0)), last.used.get(pid, (0.0, 0.0))
            cpu, delay = (round(max(b - a, 0.0) / seconds, 3) for a, b in zip(*pair, strict=True))
            sample = ProcessSample(pid, command, pid not in parents, cpu, delay)
            if found is not None:
                d = found.diagnosis
                claim = d.claim.removeprefix(f"{d.kind}: ")
                sample = replace(sample, verdict=d.kind, claim=claim, line=d.line or "", spins=found.spins)
            yield sample

    def _attach(self, pid: int) -> Attached | None:
        what = f"stacks of process {pid}"
        try:
            found = attach(pid, ATTACH_S)
        except ProcessNotFoundError as error:
            self.missing.append(f"{what}: {error}")
            return None
        self.missing += [f"{what}: {reason}" for reason in found.unseen]
        if found.samples:
            self._keep(f"stacks-{pid}.txt", "\n".join(map(stacks.format_sample, found.samples)), what)
        return found

    def _progress(self, *marks: _Mark) -> Iterator[Progress]:
        if self.case.progress:
            first, middle, last = (mark.counted[0] for mark in marks)
            yield Progress("in the output", first, middle, last, marks[-1].counted[1])
        clocks = [mark.clock for mark in marks]
        if self.case.watched and (steps := steps_at(self.attempt / "run", clocks)) is not None:
            yield Progress("steps recorded in the run", *steps)

    def _keep(self, name: str, text: str, what: str) -> None:
        path = self.attempt / "evidence" / name
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            self.missing.append(f"{what}: {path}: {error.strerror or error}")
        else:
            self.files[f"evidence/{name}"] = what

    def _text(self) -> str:
        return "\n".join(path.read_bytes().decode(errors="replace") for path in self.outputs)

    def _tail(self) -> tuple[str, ...]:
        texts = ((path.stem, path.read_bytes().decode(errors="replace")) for path in self.outputs)
        return tuple(f"{n}: {line[:500]}" for n, t in texts for line in t.splitlines()[-TAIL_LINES:])


def arrived(case: Case, alive: list[Process]) -> dict[str, bool]:
    """Return which variables of a case the innermost processes have; a launcher may drop them."""
    parents = {process.parent for process in alive}
    leaves = (processes.environment(process.pid) for process in alive if process.pid not in parents)
    found = [environment for environment in leaves if environment]
    given = {name: any(e.get(name) == v for e in found) for name, v in case.environment.items()}
    return given | {name: any(name not in e for e in found) for name in case.unset} if found else {}


def _command(process: Process) -> str:
    return " ".join(processes.command_line(process.pid)) or process.name
