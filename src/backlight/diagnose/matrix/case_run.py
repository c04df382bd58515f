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

from pydantic_core import to_json

from backlight import processes
from backlight.diagnose.matrix.cases import Case, Launch
from backlight.diagnose.matrix.inputs import prepare_files
from backlight.diagnose.matrix.results import (
    Attempt,
    Note,
    Observation,
    ProcessSample,
    Progress,
    Stall,
    Window,
    write_whole,
)
from backlight.launch import subprocess as tree
from backlight.monitors.stalls.model import stacks
from backlight.monitors.stalls.model.attach import Attached, ProcessNotFoundError, attach
from backlight.processes import Process
from backlight.store.errors import StoreError
from backlight.store.read.run import open_run
from backlight.user_code import is_user_code

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""Output after which its file is truncated: a case that prints without end must not fill the disk."""

ATTACH_S = 1.0
WATCHDOG_TIMEOUT_S = 3.0
TAIL_LINES = 15
_POLL_S, _SAMPLE_S = 0.05, 0.5
_LAUNCHER_ERRORS = "torch.distributed.elastic."


def run_case(case: Case, attempt: Attempt, *, window: float, grace: float) -> Observation:
    """Run ``case`` and return what was observed; none of its processes is left then.

    Parameters
    ----------
    case:
        What to start.
    attempt:
        The directory for its output and evidence.
    window:
        Seconds before the time limit over which CPU time and progress are measured.
    grace:
        Seconds between SIGTERM and SIGKILL.
    """
    launch, mark, begin = case.launch, uuid.uuid4().hex, time.monotonic()
    try:
        directory, argv = prepare_files(launch, launch.fill(attempt.run, attempt.path), attempt.path)
        start = {"argv": argv, "directory": str(directory), "mark": mark, "time": time.time()}
        write_whole(attempt.path / "start.json", to_json(start, indent=2))
        environment = launch.variables({"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ})
        out, errors = attempt.outputs
        with out.open("ab") as stdout, errors.open("ab") as stderr:
            process = tree.start(argv, directory, environment, mark, stdout, stderr)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Observation(time.monotonic() - begin, launch.time_limit, problem=str(error))
    started = tree.ProcessTree(process.pid, mark)
    try:
        return _CaseRun(launch, attempt, process, started, begin).observe(window, grace)
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
    launch: Launch
    attempt: Attempt
    process: subprocess.Popen[bytes]
    tree: tree.ProcessTree
    begin: float
    arrived: dict[str, bool] = field(default_factory=dict)
    dropped: int = 0
    files: list[Note] = field(default_factory=list)
    missing: list[Note] = field(default_factory=list)

    def observe(self, window: float, grace: float) -> Observation:
        marks: list[_Mark] = []
        for remaining in (window, window / 2, 0.0):
            code = self._wait(self.begin + max(self.launch.time_limit - remaining, 0.0))
            if code is not None:
                return self._exited(code, grace)
            marks.append(self._mark())
        return self._over(marks, grace)

    def _wait(self, until: float) -> int | None:
        sampled = 0.0
        while (code := self.process.poll()) is None and (now := time.monotonic()) < until:
            if now - sampled >= _SAMPLE_S:
                sampled = now
                # Also remembers processes that leave the session of a parent that ends.
                self.arrived = arrived(self.launch, self.tree.find()) or self.arrived
                for path in self.attempt.outputs:
                    if (size := path.stat().st_size) > MAX_OUTPUT_BYTES:
                        os.truncate(path, 0)
                        self.dropped += size
            time.sleep(min(_POLL_S, max(until - now, 0.0)))
        return code

    def _mark(self) -> _Mark:
        used = {process.pid: (process.cpu_s, _queued_s(process.pid)) for process in self.tree.find()}
        output = sum(path.stat().st_size for path in self.attempt.outputs) + self.dropped
        counted = count_progress(self.launch.progress, self._text())
        return _Mark(time.monotonic(), time.time(), used, output, counted)

    def _over(self, marks: list[_Mark], grace: float) -> Observation:
        first, middle, last = marks
        seconds = time.monotonic() - self.begin
        tail = self._tail()
        self._keep("tail.txt", "\n".join(tail), "end of the output before the case was ended")
        samples = self._sample(middle, last)
        stalls = self._stalls()
        ended_by = self.tree.end(grace)
        used = sum(sample.cpu for sample in samples)
        progress = tuple(self._progress(marks))
        window = Window(round(last.time - first.time, 3), used, last.output - middle.output, progress)
        return self._observation(seconds, None, tail, stalls, ended_by, window, samples)

    def _exited(self, code: int, grace: float) -> Observation:
        seconds = time.monotonic() - self.begin
        self.tree.wait_for_watchdogs(WATCHDOG_TIMEOUT_S)
        left = [f"{process.pid} {_command(process)}" for process in self.tree.find()]
        if left:
            self._keep("left-behind.txt", "\n".join(left), "processes that the case left running")
        ended_by = self.tree.end(grace)
        return self._observation(seconds, code, self._tail(), self._stalls(), ended_by)

    def _observation(
        self, seconds: float, code: int | None, tail: tuple[str, ...], stalls: tuple[Stall, ...],
        ended_by: tuple[str, ...], window: Window | None = None, samples: tuple[ProcessSample, ...] = (),
    ) -> Observation:  # fmt: skip
        text = self._text()
        error, line = last_error(text) if code else ("", "")
        if self.dropped:
            self.missing.append(Note("the begin of the output", f"{self.dropped:,} bytes were dropped"))
        if self.launch.watched and not self.attempt.run.is_dir():
            self.missing.append(Note("the run directory", "the case wrote none"))
        success = bool(re.search(self.launch.success, text, re.MULTILINE)) if self.launch.success else None
        kept = {self.attempt.path / "start.json": "command", self.attempt.run: "run directory"}
        kept |= dict(zip(self.attempt.outputs, ("output", "errors"), strict=True))
        files = [Note(self.attempt.relative(path), what) for path, what in kept.items() if path.exists()]
        return Observation(
            round(seconds, 3), self.launch.time_limit, code, "", success, window, samples, stalls, error,
            line, tail, (*files, *self.files), tuple(dict.fromkeys(self.missing)), ended_by, self.arrived,
        )  # fmt: skip

    def _sample(self, middle: _Mark, last: _Mark) -> tuple[ProcessSample, ...]:
        """Record the kernel's view of every process, then attach to each Python process."""
        alive = [process for process in self.tree.find() if not tree.is_watchdog(process.pid)]
        parents = {process.parent for process in processes.read_process_table().values()}
        commands = {process.pid: _command(process) for process in alive}
        self._keep(
            "processes.txt",
            "\n\n".join(
                f"{pid} {command}\n{processes.format_threads(pid)}" for pid, command in commands.items()
            ),
            "processes of the case, with state, wait and CPU time of each thread",
        )
        with ThreadPoolExecutor(8) as pool:
            attached = list(pool.map(self._attach, commands))
        seconds = max(last.time - middle.time, 1e-3)
        samples = []
        for (pid, command), found in zip(commands.items(), attached, strict=True):
            pair = middle.used.get(pid, (0.0, 0.0)), last.used.get(pid, (0.0, 0.0))
            cpu, delay = (round(max(b - a, 0.0) / seconds, 3) for a, b in zip(*pair, strict=True))
            sample = ProcessSample(pid, command, pid not in parents, cpu, delay)
            if found is not None:
                d = found.diagnosis
                claim = d.claim.removeprefix(f"{d.kind}: ")
                sample = replace(
                    sample, verdict=d.kind, claim=claim, line=d.line or "", phase=str(d.phase),
                    spins=found.spins,
                )  # fmt: skip
            samples.append(sample)
        return tuple(samples)

    def _attach(self, pid: int) -> Attached | None:
        what = f"stacks of process {pid}"
        try:
            found = attach(pid, ATTACH_S)
        except ProcessNotFoundError as error:
            self.missing.append(Note(what, str(error)))
            return None
        self.missing += [Note(what, reason) for reason in found.unseen]
        if found.samples:
            self._keep(
                f"stacks-{pid}.txt", "\n".join(stacks.format_sample(each) for each in found.samples), what
            )
        return found

    def _progress(self, marks: list[_Mark]) -> Iterator[Progress]:
        if self.launch.progress:
            first, middle, last = (mark.counted[0] for mark in marks)
            yield Progress("in the output", first, middle, last, marks[-1].counted[1])
        steps = steps_at(self.attempt.run, [mark.clock for mark in marks]) if self.launch.watched else None
        if steps is not None:
            yield Progress("steps recorded in the run", *steps)

    def _stalls(self) -> tuple[Stall, ...]:
        return read_stalls(self.attempt.run, self.attempt.relative(self.attempt.run))

    def _keep(self, name: str, text: str, what: str) -> None:
        path = self.attempt.path / "evidence" / name
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            self.missing.append(Note(what, f"{path}: {error.strerror or error}"))
        else:
            self.files.append(Note(self.attempt.relative(path), what))

    def _text(self) -> str:
        return "\n".join(path.read_bytes().decode(errors="replace") for path in self.attempt.outputs)

    def _tail(self) -> tuple[str, ...]:
        tails = ((path, path.read_bytes().decode(errors="replace")) for path in self.attempt.outputs)
        return tuple(f"{p.stem}: {line[:500]}" for p, t in tails for line in t.splitlines()[-TAIL_LINES:])


def arrived(launch: Launch, alive: list[Process]) -> dict[str, bool]:
    """Return which variables of the launch the innermost processes have; a launcher may drop them."""
    parents = {process.parent for process in alive}
    leaves = (processes.environment(process.pid) for process in alive if process.pid not in parents)
    found = [environment for environment in leaves if environment]
    given = {name: any(e.get(name) == v for e in found) for name, v in launch.environment.items()}
    return given | {name: any(name not in e for e in found) for name in launch.unset} if found else {}


def _command(process: Process) -> str:
    return " ".join(processes.command_line(process.pid)) or process.name


def _queued_s(pid: int) -> float:
    return sum(thread.queued_ns for thread in processes.read_threads(pid)) / 1e9


def count_progress(pattern: str, text: str) -> tuple[int, int]:
    """Return position and end of a case as printed (0 where unknown).

    The first group of ``pattern`` is the position and the second the end, in the last match; a pattern
    without groups, or with words in them, is counted.
    """
    matches = list(re.finditer(pattern, text, re.MULTILINE)) if pattern else []
    if not matches:
        return 0, 0
    groups = [*(group or "" for group in matches[-1].groups()), "", ""]
    return int(groups[0]) if groups[0].isdecimal() else len(matches), int(groups[1]) if groups[
        1
    ].isdecimal() else 0


def steps_at(path: Path, clocks: list[float]) -> tuple[int, ...] | None:
    """Return how many steps of a run had ended at each moment (seconds since the epoch), None if unknown."""
    # By the times that the training process recorded, so that a late write shows no progress.
    try:
        times = open_run(path).scalar("time")
    except (StoreError, OSError):
        return None
    if not len(times.steps):
        return None
    return tuple(int(times.steps[times.values <= clock].max(initial=-1)) + 1 for clock in clocks)


def read_stalls(path: Path, name: str) -> tuple[Stall, ...]:
    """Return the stall findings of a run directory, oldest first."""
    try:
        run = open_run(path)
        subjects = [(f, f.subject) for f in run.stored_findings() if f.rule == "stall" and f.subject.verdict]
        events = sorted(
            (e for kind in ("stall", "stall_over") for e in run.events(kind)), key=lambda e: e.time
        )
    except (StoreError, OSError):
        return ()
    over = bool(events) and events[-1].kind == "stall_over"
    return tuple(
        Stall(str(s.verdict), f.detail, s.phase or "", s.line or "", f.refuted_if, name, over)
        for f, s in subjects
    )


def last_error(text: str) -> tuple[str, str]:
    """Return the error that an output ends with, and its ``file:line`` in the user's code; empty without.

    faulthandler's report of a fatal signal counts; a launcher's report on its children only if it is alone.
    """
    found: list[tuple[str, str]] = []
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("Fatal Python"):
            sample = stacks.parse_faulthandler("\n".join(lines[index:]), 0)
            frames = [f for thread in sample.threads for f in thread.frames if is_user_code(f.file)]
            found.append((line, f"{frames[0].file}:{frames[0].line}" if frames else ""))
        elif line.startswith("Traceback ("):
            found.append(_exception(lines[index + 1 :]))
    own = [entry for entry in found if not entry[0].startswith(_LAUNCHER_ERRORS)]
    # A script that refuses its arguments prints a line and no traceback.
    refused = [(line, "") for line in lines if re.match(r"\S+: error: ", line)]
    return next((group[-1] for group in (own, refused) if group), (found[-1][0], "") if found else ("", ""))


def _exception(lines: list[str]) -> tuple[str, str]:
    position = ""
    for line in lines:
        if frame := re.match(r'^ *File "(.+)", line (\d+)(?:, in .*)?$', line):
            position = f"{frame[1]}:{frame[2]}" if is_user_code(frame[1]) else position
        elif line and not line.startswith(" "):
            return line, position
    return "", position
