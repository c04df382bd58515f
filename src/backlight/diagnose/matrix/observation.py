"""What was observed of one case, as frozen records, and how it is read from outputs and run directories."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backlight.monitors.stalls.model import stacks
from backlight.records import DiagnosisKind, Finding
from backlight.store.errors import StoreError
from backlight.store.read.run import Run, open_run
from backlight.user_code import is_user_code

_LAUNCHER_ERRORS = "torch.distributed.elastic."


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process when the time of its case was over, with the diagnosis of the stall monitor.

    ``cpu`` and ``delay`` (running and queued for a core) are in cores, over the last half of the window.
    ``leaf``: it has no children. ``spins``: it held the interpreter lock on one line in every sample.
    """

    pid: int
    command: str
    leaf: bool
    cpu: float
    delay: float = 0.0
    verdict: DiagnosisKind = DiagnosisKind.UNKNOWN
    claim: str = ""
    line: str = ""
    spins: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress at the begin, middle and end of the window; ``total`` is 0 where it is not known."""

    source: str
    before: int
    middle: int
    after: int
    total: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything observed of one case.

    ``exit_code`` is negative where a signal ended it and None where its time was over; ``problem`` is why it
    did not start. ``window_s`` is the length of the window before the limit, 0 without one; ``output_bytes``
    is of its second half. ``resumed``: progress followed the last of ``stalls``. ``files`` are evidence with
    its content, relative to the attempt. ``arrived``: whether a variable of the plan reached the process that
    does the work. ``digest`` is that of the case.
    """

    seconds: float
    limit: float
    exit_code: int | None = None
    problem: str = ""
    success: bool | None = None
    window_s: float = 0.0
    output_bytes: int = 0
    progress: tuple[Progress, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    stalls: tuple[Finding, ...] = ()
    resumed: bool = False
    error: str = ""
    error_line: str = ""
    tail: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    ended_by: tuple[str, ...] = ()
    arrived: Mapping[str, bool] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    digest: str = ""


def open_case_run(path: Path) -> Run | None:
    """Return the run that a case wrote, None without one."""
    try:
        return open_run(path)
    except (StoreError, OSError):
        return None


def read_stalls(path: Path) -> tuple[tuple[Finding, ...], bool]:
    """Return the stall findings of a run directory, oldest first, and whether progress has resumed since."""
    run = open_case_run(path)
    if run is None:
        return (), False
    found = tuple(f for f in run.stored_findings() if f.rule == "stall" and f.subject.verdict)
    events = sorted((e for kind in ("stall", "stall_over") for e in run.events(kind)), key=lambda e: e.time)
    return found, bool(events) and events[-1].kind == "stall_over"


def steps_at(path: Path, clocks: Sequence[float]) -> tuple[int, ...] | None:
    """Return how many steps of a run had ended at each moment (seconds since the epoch), None if unknown."""
    run = open_case_run(path)
    # By the times that the training process recorded, so that a late write shows no progress.
    times = run.scalar("time") if run is not None else None
    if times is None or not len(times.steps):
        return None
    return tuple(int(times.steps[times.values <= clock].max(initial=-1)) + 1 for clock in clocks)


def count_progress(pattern: str, text: str) -> tuple[int, int]:
    """Return position and end as printed (0 where unknown); without numbers, matches are counted."""
    matches = list(re.finditer(pattern, text, re.MULTILINE)) if pattern else []
    if not matches:
        return 0, 0
    position, end, *_ = *(group or "" for group in matches[-1].groups()), "", ""
    return int(position) if position.isdecimal() else len(matches), int(end) if end.isdecimal() else 0


def last_error(text: str) -> tuple[str, str]:
    """Return the error that an output ends with, and its ``file:line`` in the user's code; empty without."""
    found: list[tuple[str, str]] = []
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("Fatal Python"):
            sample = stacks.parse_faulthandler("\n".join(lines[index:]))
            frames = (f for thread in sample.threads for f in thread.frames if is_user_code(f.file))
            found.append((line, str(next(frames, ""))))
        elif line.startswith("Traceback ("):
            found.append(_exception(lines[index + 1 :]))
    # A launcher's report on its children counts only if it is alone.
    own = [entry for entry in found if not entry[0].startswith(_LAUNCHER_ERRORS)]
    # A script that refuses its arguments prints a line and no traceback.
    refused = [(line, "") for line in lines if re.match(r"\S+: error: ", line)]
    return (own or refused or [(error, "") for error, _ in found] or [("", "")])[-1]


def _exception(lines: list[str]) -> tuple[str, str]:
    position = ""
    for line in lines:
        if frame := re.match(r'^ *File "(.+)", line (\d+)(?:, in .*)?$', line):
            position = f"{frame[1]}:{frame[2]}" if is_user_code(frame[1]) else position
        elif line and not line.startswith(" "):
            return line, position
    return "", position
