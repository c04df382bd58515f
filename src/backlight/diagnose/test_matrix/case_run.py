"""One case: start it, observe it, and collect all evidence before its processes are ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backlight import processes
from backlight.diagnose.test_matrix.plan import Case, fill
from backlight.distributed import ProcessNotFoundError
from backlight.launch.subprocess import ProcessTree, end_marked, is_watchdog, start
from backlight.records import Finding
from backlight.redaction import Redaction
from backlight.store.errors import StoreError
from backlight.store.format.manifest import write_document
from backlight.store.read.run import Run, open_run
from backlight.threads import executor
from backlight.user_code import is_user_code
from backlight.watchdog import stacks
from backlight.watchdog.attach import Attached, attach

MAX_WINDOW_S = 10.0
GRACE_S = 3.0  # between SIGTERM and SIGKILL
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""Output after which its file is truncated: a case that prints without end must not fill the disk."""

WATCHDOG_TIMEOUT_S = 3.0
OUTPUTS, EVIDENCE = ("stdout.txt", "stderr.txt"), "evidence.txt"
_POLL_S, _SAMPLE_S = 0.05, 0.5
_LAUNCHER_ERRORS = "torch.distributed.elastic."
_TRACEBACK = re.compile(r"^Traceback \(.*\n((?:[ \t].*\n|\n)*)(.*)", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CaseProgress:
    """Progress at the begin, middle and end of the window."""

    source: str
    before: int
    middle: int
    after: int


@dataclass(frozen=True, slots=True)
class CaseObservation:
    """Everything observed of one case.

    ``exit_code`` is negative where a signal ended it and None where its time was over. Then ``window_s`` is
    the length of the window before the limit, ``output`` counts the characters printed in its second half,
    and ``processes`` holds the innermost ones first. ``stall``: the last stall finding that is not over.
    """

    seconds: float
    exit_code: int | None = None
    success: bool | None = None
    window_s: float = 0.0
    output: int = 0
    progress: tuple[CaseProgress, ...] = ()
    processes: tuple[Attached, ...] = ()
    stall: Finding | None = None
    error: str = ""
    error_line: str = ""
    ended_by: tuple[str, ...] = ()


def run_case(case: Case, attempt: Path) -> CaseObservation:
    """Run ``case`` in a directory of its own and return what was observed; none of its processes is left."""
    mark = uuid.uuid4().hex
    argv = [fill(part, {"run": str(attempt / "run")}) for part in case.argv]
    shown = Redaction().arguments(argv)
    write_document(attempt / "start.json", {"argv": shown, "directory": case.directory, "mark": mark})
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ, **case.environment}
    process = tree = None
    try:
        with (attempt / "stdout.txt").open("ab") as out, (attempt / "stderr.txt").open("ab") as errors:
            process = start(argv, Path(case.directory), environment, mark, out, errors)
        tree = ProcessTree(process.pid, mark)
        return _observe(case, attempt, process, tree)
    finally:
        # Also after an interrupt, even inside of start, nothing of the case is left running.
        if tree is None:
            end_marked([mark])
        else:
            tree.end(GRACE_S)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


def _observe(
    case: Case, attempt: Path, process: subprocess.Popen[bytes], tree: ProcessTree
) -> CaseObservation:
    begin, window = time.monotonic(), min(MAX_WINDOW_S, case.time_limit / 3)
    moments, texts = [], []
    for left in (window, window / 2, 0.0):
        code = _wait(process, tree, attempt, begin + case.time_limit - left)
        moments.append(time.time())
        texts.append(read_output(attempt))
        if code is not None:
            break
    observed = CaseObservation(round(time.monotonic() - begin, 3), code)
    if code is None:
        observed = replace(
            observed, window_s=round(moments[2] - moments[0], 3), output=len(texts[2]) - len(texts[1]),
            progress=_progress(case, attempt, moments, texts), processes=_attach_all(attempt, tree),
        )  # fmt: skip
    else:
        tree.wait_for_watchdogs(WATCHDOG_TIMEOUT_S)
    # Before the processes are ended: their deaths are no findings of the run.
    stall = last_stall(open_case_run(attempt))
    ended_by, text = tree.end(GRACE_S), read_output(attempt)
    error, error_line = last_error(text) if code else ("", "")
    return replace(
        observed, stall=stall, ended_by=ended_by, error=error, error_line=error_line,
        success=bool(re.search(case.success, text, re.MULTILINE)) if case.success else None,
    )  # fmt: skip


def _wait(process: subprocess.Popen[bytes], tree: ProcessTree, attempt: Path, until: float) -> int | None:
    sampled = 0.0
    while (code := process.poll()) is None and (now := time.monotonic()) < until:
        if now - sampled >= _SAMPLE_S:
            sampled = now
            tree.find()  # remembers processes that leave the session of a parent that ends
            for name in OUTPUTS:
                if (attempt / name).stat().st_size > MAX_OUTPUT_BYTES:
                    os.truncate(attempt / name, 0)
        time.sleep(min(_POLL_S, max(until - now, 0.0)))
    return code


def _progress(case: Case, attempt: Path, moments: list[float], texts: list[str]) -> tuple[CaseProgress, ...]:
    progress = []
    if case.progress:
        progress.append(
            CaseProgress("in the output", *(count_progress(case.progress, text) for text in texts))
        )
    if (steps := steps_at(open_case_run(attempt), moments)) is not None:
        progress.append(CaseProgress("steps recorded in the run", *steps))
    return tuple(progress)


def _attach_all(attempt: Path, tree: ProcessTree) -> tuple[Attached, ...]:
    """Attach to every process of the case, and keep its threads and stacks as text."""
    parents = {process.parent for process in processes.read_process_table().values()}
    # A process without children explains more than the launcher that waits for it.
    alive = sorted(tree.find(), key=lambda process: (process.pid in parents, process.pid))
    with executor(8) as pool:
        pids = (process.pid for process in alive if not is_watchdog(process.pid))
        attached = tuple(each for each in pool.map(_attach, pids) if each is not None)
    with (attempt / EVIDENCE).open("w", encoding="utf-8", errors="replace") as file:
        for process in attached:
            command = " ".join(processes.command_line(process.pid))
            samples = "\n".join(map(stacks.format_sample, process.samples))
            file.write(f"{process.pid} {command}\n{process.threads}\n{samples}\n\n")
    return attached


def _attach(pid: int) -> Attached | None:
    with contextlib.suppress(ProcessNotFoundError):  # it has ended meanwhile
        return attach(pid)
    return None


def read_output(attempt: Path) -> str:
    """Return what an attempt printed, the errors last."""
    return "\n".join((attempt / name).read_text(encoding="utf-8", errors="replace") for name in OUTPUTS)


def open_case_run(attempt: Path) -> Run | None:
    """Return the run that a case wrote, None without one."""
    with contextlib.suppress(StoreError, OSError):
        return open_run(attempt / "run")
    return None


def last_stall(run: Run | None) -> Finding | None:
    """Return the last stall finding of a run, None if progress has resumed since."""
    if run is None:
        return None
    events = sorted((e for kind in ("stall", "stall_over") for e in run.events(kind)), key=lambda e: e.time)
    stalls = [f for f in run.stored_findings() if f.rule == "stall" and f.subject.verdict]
    return stalls[-1] if stalls and not (events and events[-1].kind == "stall_over") else None


def steps_at(run: Run | None, moments: Sequence[float]) -> tuple[int, ...] | None:
    """Return how many steps of a run had ended at each moment (seconds since the epoch), None if unknown."""
    # By the times that the training process recorded, so that a late write shows no progress.
    times = run.scalar("time") if run is not None else None
    if times is None or not len(times.steps):
        return None
    return tuple(int(times.steps[times.values <= moment].max(initial=-1)) + 1 for moment in moments)


def count_progress(pattern: str, text: str) -> int:
    """Return the position as last printed, 0 without; of a pattern without a number, matches are counted."""
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    position = next(iter(matches[-1].groups("")), "") if matches else ""
    return int(position) if position.isdecimal() else len(matches)


def last_error(text: str) -> tuple[str, str]:
    """Return the error that an output ends with, and its ``file:line`` in the user's code; empty without."""
    errors = [(match[2], _user_lines(match[1])[-1:]) for match in _TRACEBACK.finditer(text)]
    if fatal := re.search(r"^Fatal Python error.*", text, re.MULTILINE):
        errors.append((fatal[0], _user_lines(text[fatal.end() :])[:1]))  # most recent call first
    # A launcher's report on its children counts only if it is alone.
    of_case = [(error, lines) for error, lines in errors if not error.startswith(_LAUNCHER_ERRORS)]
    # A script that refuses its arguments prints a line and no traceback.
    refused = [(error, [""]) for error in re.findall(r"^\S+: error: .*", text, re.MULTILINE)]
    error, lines = (of_case or refused or errors or [("", [""])])[-1]
    return error, "".join(lines)


def _user_lines(frames: str) -> list[str]:
    return [f"{file}:{line}" for file, line in _FRAME.findall(frames) if is_user_code(file)]
