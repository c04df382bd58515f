"""Which verdict each planted stall must get: the fault suite of the room, for the tests and for the bench."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from backlight.records import Finding
from backlight.stalls.rendezvous import meeting_place
from backlight.store.reader import open_run

HERE = Path(__file__).parent
STALL = 1.2
LASTS = 3.0


@dataclass(frozen=True)
class Fault:
    """A planted fault and what must be said of it.

    ``line`` is the mark of the line at fault, empty where none can be named; ``rank`` the cause; a verdict
    None is a stretch of time that must stay silent. ``also`` are verdicts that are true and miss the cause.
    """

    name: str
    verdict: str | None
    phase: str = "backward"
    line: str = ""
    parameter: str | None = None
    rank: int = 0
    world: int = 1
    alone: bool = False
    slow: bool = False
    also: tuple[str, ...] = ()

    @property
    def argument(self) -> str:
        """What the script is given."""
        return f"{self.name}:{self.rank}" if self.world > 1 else self.name


SECOND = "second.weight"
ONE = (
    Fault("sleep", "BLOCKED", line="sleep", parameter=SECOND),
    Fault("spin", "SPIN", line="spin", parameter=SECOND),
    Fault("lock", "BLOCKED", line="lock", parameter=SECOND),
    Fault("gil_spin", "SPIN", line="gil_spin", parameter=SECOND),
    Fault("gil_block", "BLOCKED", line="gil_block", parameter=SECOND),
    Fault("long_op", "LONG_OP", line="long_op", parameter=SECOND, slow=True),
    Fault("slow", "SLOW", parameter=SECOND),
    Fault("nested", "BLOCKED", line="lock"),
    Fault("threads", "BLOCKED", line="lock"),
    Fault("data", "PHASE", phase="data"),
    Fault("worker_stopped", "PHASE", phase="data"),
    Fault("forward", "PHASE", phase="forward", line="forward"),
    Fault("between", "PHASE", phase="other", line="between"),
    Fault("nodes", "SLOW", alone=True),
    Fault("checkpointed", "SLOW", alone=True, slow=True),
    Fault("evaluation", None),
    Fault("save", None),
    Fault("stop", "STOPPED", phase="other"),
    Fault("kill", "DEAD", phase="other"),
)
RANKS = (
    Fault("between", "PHASE", phase="other", line="between", rank=1, world=3),
    Fault("backward", "BLOCKED", line="backward", rank=2, world=3, parameter=SECOND),
    Fault("spin", "SPIN", line="spin", rank=1, world=3, slow=True),
    Fault("stop", "STOPPED", phase="other", rank=0, world=3),
    Fault("evaluation", None, rank=0, world=3),
    Fault("broadcast", "MISMATCH", phase="other", rank=1, world=3),
    Fault("skip", "MISMATCH", phase="other", rank=1, world=3, slow=True),
    Fault("reorder", "MISMATCH", phase="other", rank=2, world=3, slow=True),
    Fault("barrier", "MISMATCH", phase="other", rank=0, world=3, slow=True),
    Fault("subgroup", "MISMATCH", phase="other", rank=0, world=3, slow=True),
    Fault("shape", "MISMATCH", phase="other", rank=1, world=3, slow=True, also=("DEAD",)),
    Fault("fewer", "MISMATCH", phase="other", rank=1, world=3, slow=True),
    Fault("ends", "DEAD", phase="other", rank=1, world=3, slow=True),
    Fault("kill", "DEAD", phase="other", rank=1, world=3),
    Fault("ddp_backward", "BLOCKED", line="backward", rank=2, world=3, parameter=SECOND, slow=True),
    Fault("ddp_skip", "DEAD", phase="other", rank=1, world=3, slow=True, also=("MISMATCH", "PHASE")),
)
LASTING = {
    "broadcast",
    "skip",
    "reorder",
    "barrier",
    "subgroup",
    "shape",
    "fewer",
    "ends",
    "kill",
    "ddp_skip",
}
"""Faults that do not let go: each needs a launch of its own."""


def marked(script: Path, mark: str) -> str:
    """Return file and line that carry a mark."""
    for number, text in enumerate(script.read_text(encoding="utf-8").splitlines(), start=1):
        if re.search(rf"# at: {mark}$", text):
            return f"{script}:{number}"
    raise ValueError(f"{script}: no line is marked '# at: {mark}'")


def run_faults(
    faults: list[Fault],
    out: Path,
    *,
    seconds: float = LASTS,
    stall: float | None = STALL,
    limit: float = 120.0,
) -> tuple[list[Finding], str, int]:
    """Run faults of one size one after the other; return the stored findings, the output and the exit code.

    A run that hangs is ended once it has said something, or at ``limit``.
    """
    world = faults[0].world
    script = HERE / ("trainings.py" if world == 1 else "ranks.py")
    options = ["--rooms", "stalls", "--out", str(out), *([] if stall is None else ["--stall", str(stall)])]
    command = [sys.executable, "-m", "backlight", "run", *options, str(script)]
    if world > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m"]
        command = [sys.executable, *launcher, *command[2:]]
    command += [str(seconds), *(fault.argument for fault in faults)]
    launch = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "", "BACKLIGHT_RUN_ID": launch}
    log = out.with_suffix(".log")
    lasting = world > 1 and any(fault.name in LASTING for fault in faults)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + limit
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if lasting and seconds >= STALL and found(out):
                break
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    wait_for_sidecar(meeting_place(out, 0, launch))
    return found(out), log.read_text(encoding="utf-8", errors="replace"), process.returncode


def found(out: Path) -> list[Finding]:
    """Return what the run holds so far."""
    if not (out / "manifest.json").exists():
        return []
    return [f for f in open_run(out).stored_findings() if f.rule == "stall"]


def wait_for_sidecar(place: Path, seconds: float = 10.0) -> None:
    """Wait until the place at which the ranks met is gone, which is when the sidecar has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and place.exists():
        time.sleep(0.1)


def score(fault: Fault, findings: list[Finding], script: Path) -> tuple[str, str]:
    """Judge what was said of one fault: right, undetermined or wrong, and why."""
    if fault.verdict is None:
        return ("right", "silent") if not findings else ("wrong", f"said {findings[0].claim}")
    if not findings:
        return "undetermined", "nothing was said"
    subject = findings[-1].subject
    if subject.verdict == "UNKNOWN":
        return "undetermined", findings[-1].claim
    if subject.verdict not in {fault.verdict, *fault.also}:
        return "wrong", f"{subject.verdict} for {fault.verdict}: {findings[-1].claim}"
    if subject.verdict in fault.also:
        return "undetermined", f"true, but not the cause: {findings[-1].claim}"
    if subject.verdict == fault.verdict and fault.phase != subject.phase and fault.verdict != "MISMATCH":
        return "wrong", f"phase {subject.phase} for {fault.phase}"
    if subject.rank is None:
        return "undetermined", f"no rank: {findings[-1].claim}"
    if subject.rank != fault.rank and subject.verdict == fault.verdict:
        return "wrong", f"rank {subject.rank} for {fault.rank}: {findings[-1].claim}"
    if fault.line and subject.line != marked(script, fault.line):
        return ("undetermined" if subject.line is None else "wrong"), f"line {subject.line}"
    if fault.parameter and subject.parameter != fault.parameter:
        return ("undetermined" if subject.parameter is None else "wrong"), f"parameter {subject.parameter}"
    return "right", findings[-1].claim


def step_of(index: int, world: int) -> int:
    """Return the step at which the fault with this number on the command line strikes."""
    return 3 * index + 2 if world == 1 else 2 * index + 1
