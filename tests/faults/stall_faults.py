"""Expected diagnosis of each injected stall, for the tests and for the bench."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from backlight.records import Finding
from backlight.store.read.run import open_run
from backlight.store.write.watchdog import host_name
from backlight.watchdog.runtime_dir import runtime_directory

HERE = Path(__file__).parent
STALL = 1.2
LASTS = 3.0


@dataclass(frozen=True)
class Fault:
    """An injected fault and its expected diagnosis.

    ``kind`` None is a period without a diagnosis; ``line`` is the mark of the line at fault, empty where none
    can be named; ``rank`` the cause; ``pattern`` matches the detail. ``control`` is the argument of the
    script for the control of a fault that does not end: ``all`` ranks do the same, or ``none`` does anything.
    """

    name: str
    kind: str | None
    phase: str = "backward"
    line: str = ""
    parameter: str | None = None
    rank: int = 0
    world: int = 1
    alone: bool = False
    slow: bool = False
    pattern: str = ""
    control: str = "all"
    builds: bool = False
    module: str = ""

    @property
    def script(self) -> Path:
        """The script that it is injected into."""
        return HERE / (self.module or ("one_process.py" if self.world == 1 else "ranks.py"))

    @property
    def argument(self) -> str:
        """Argument of the script."""
        return f"{self.name}:{self.rank}" if self.world > 1 else self.name

    @property
    def lasting(self) -> bool:
        """Whether it does not end, and so needs a launch of its own."""
        return self.name in LASTING


SECOND = "second.weight"
ONE = (
    Fault("sleep", "BLOCKED", line="sleep", parameter=SECOND, pattern="sleeps"),
    Fault("spin", "SPIN", line="spin", parameter=SECOND),
    Fault("lock", "BLOCKED", line="lock", parameter=SECOND, pattern="waits for a lock"),
    Fault("lock_order", "BLOCKED", line="lock_order", parameter=SECOND, pattern="waits for a lock"),
    Fault("gil_spin", "SPIN", line="gil_spin", parameter=SECOND, pattern="holds the interpreter lock"),
    Fault("gil_block", "BLOCKED", line="gil_block", parameter=SECOND),
    Fault("long_op", "LONG_OP", line="long_op", parameter=SECOND, slow=True),
    Fault("slow", "SLOW", parameter=SECOND),
    Fault("nested", "BLOCKED", line="lock"),
    Fault("threads", "BLOCKED", line="lock"),
    Fault("thrash", "SLOW"),
    Fault("data", "PHASE", phase="data"),
    Fault("worker_stopped", "PHASE", phase="data", pattern="1 of them stopped"),
    Fault("feeder", "PHASE", phase="data", pattern="1 of them dead", alone=True, slow=True),
    Fault("worker_killed", None, alone=True, slow=True),
    Fault("forward", "PHASE", phase="forward", line="forward"),
    Fault("between", "PHASE", phase="other", line="between"),
    Fault("nodes", "SLOW", alone=True, builds=True, pattern=r"backward [\d,]+ of [\d,]+ nodes"),
    Fault("checkpointed", "SLOW", alone=True, slow=True, builds=True),
    Fault("evaluation", None),
    Fault("save", None),
    Fault("compile", None, alone=True, slow=True),
    Fault("stop", "STOPPED", phase="other"),
    Fault("kill", "DEAD", phase="other", pattern="SIGKILL", control="none"),
)
_ranks = functools.partial(Fault, rank=1, world=3)
RANKS = (
    _ranks("between", "PHASE", phase="other", line="between"),
    _ranks("backward", "BLOCKED", line="backward", rank=2, parameter=SECOND),
    _ranks("spin", "SPIN", line="spin", slow=True),
    _ranks("stop", "STOPPED", phase="other", rank=0),
    _ranks("evaluation", None, rank=0),
    _ranks("straggler", "SLOW", phase="", rank=2, pattern="straggler, not hung"),
    _ranks("broadcast", "MISMATCH", pattern=r"rank 1 calls broadcast\(16 float32\), the others call all"),
    _ranks("skip", "MISMATCH", slow=True, pattern="at collective 3 rank 1 calls all_gather"),
    _ranks("add", "MISMATCH", slow=True, pattern="at collective 4 rank 1 calls all_reduce"),
    _ranks("reorder", "MISMATCH", rank=2, slow=True, pattern="at collective 4 rank 2 calls barrier"),
    _ranks("barrier", "MISMATCH", rank=0, slow=True, pattern="rank 0 calls barrier"),
    _ranks("subgroup", "MISMATCH", rank=0, slow=True, pattern=r"#1 of group (\d )?\[0, 1\]"),
    _ranks("shape", "MISMATCH", slow=True, pattern=r"rank 1 calls all_reduce\(1048576 float32\)"),
    _ranks("dtype", "MISMATCH", slow=True, pattern=r"rank 1 calls all_reduce\(16 int32\)"),
    _ranks("fewer", "MISMATCH", slow=True, pattern="rank 1 calls barrier"),
    _ranks("ends", "DEAD", phase="other", slow=True, pattern="has ended its training after step 1"),
    _ranks("raise", "DEAD", phase="other", line="raise", pattern="ValueError: injected", control="none"),
    _ranks("oom", "DEAD", phase="other", line="oom", slow=True, pattern="out of memory", control="none"),
    _ranks(
        "worker", "DEAD", phase="data", line="worker", slow=True, pattern="DataLoader worker", control="none"
    ),
    _ranks("kill", "DEAD", phase="other", pattern="SIGKILL", control="none"),
    _ranks("ddp_backward", "BLOCKED", line="backward", rank=2, parameter=SECOND, slow=True),
    _ranks("ddp_forward", "PHASE", phase="forward", line="ddp_forward", rank=0, slow=True),
    _ranks(
        "ddp_branch",
        "DEAD",
        phase="",
        slow=True,
        pattern="Expected to have finished reduction",
        control="none",
    ),
    _ranks("ddp_skip", "MISMATCH", slow=True, pattern="with 3 backward passes where the others are at 4"),
)
_issued = functools.partial(_ranks, module="issued_collectives.py")
ISSUED = (
    _issued(
        "async_late",
        "PHASE",
        phase="other",
        line="async_late",
        pattern=r"rank 0, 2 in all_reduce\(16 float32\)",
    ),
    _issued("async_skip", "MISMATCH", slow=True, pattern="rank 1 waits in barrier"),
    _issued("async_size", "MISMATCH", slow=True, pattern=r"rank 1 calls all_reduce\(32 float32\)"),
    _issued("order", "MISMATCH", slow=True, pattern="of group other"),
    _issued(
        "ddp_late", "PHASE", phase="forward", line="late", pattern="rank 0, 2 in the reduction of bucket"
    ),
    _issued(
        "hook_late",
        "PHASE",
        phase="forward",
        line="late",
        pattern=r"rank 0, 2 in all_reduce\(8 float32\) #\d+, issued in backward at ",
    ),
    _issued("fsdp_late", "PHASE", phase="forward", line="late", pattern="rank 0, 2 in all_gather"),
    _issued("fsdp_skip", "MISMATCH", slow=True, pattern="all_gather"),
)
LASTING = {
    "add", "async_size", "async_skip", "barrier", "broadcast", "ddp_branch", "ddp_skip", "dtype", "ends",
    "fewer", "fsdp_skip", "kill", "oom", "order", "raise", "reorder", "shape", "skip", "subgroup", "worker",
    "worker_killed",
}  # fmt: skip
"""Faults that do not end: each needs a launch of its own."""


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
    limit_s: float = 240.0,
    control: bool = False,
) -> tuple[list[Finding], str, int]:
    """Run faults of one size one after the other; return the stored findings, the output and the exit code.

    A run that hangs is ended once it has a finding, or at ``limit_s``. ``control``: run the control of faults
    that do not end.
    """
    world = faults[0].world
    script = faults[0].script
    options = ["--monitors", "stalls", "--out", str(out), *([] if stall is None else ["--stall", str(stall)])]
    command = [sys.executable, "-m", "backlight", "run", *options, str(script)]
    if world > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m"]
        command = [sys.executable, *launcher, *command[2:]]
    command += [str(seconds), *(f"{f.name}:{f.control}" if control else f.argument for f in faults)]
    launch = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "", "BACKLIGHT_RUN_ID": launch}
    environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a cached compilation would be quick
    log = out.with_suffix(".log")
    lasting = world > 1 and not control and any(fault.lasting for fault in faults)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + limit_s
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
    wait_for_end_of_watchdog(runtime_directory(out, 0, f"{launch}@{host_name()}"))
    return found(out), log.read_text(encoding="utf-8", errors="replace"), process.returncode


def found(out: Path) -> list[Finding]:
    """Return what the run holds so far."""
    if not (out / "manifest.json").exists():
        return []
    return [f for f in open_run(out).stored_findings() if f.rule == "stall"]


def wait_for_end_of_watchdog(directory: Path, timeout_s: float = 60.0) -> None:
    """Wait until the watchdog has ended, which removes the runtime directory."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and directory.exists():
        time.sleep(0.1)


def findings_on(fault: Fault, index: int, findings: list[Finding], *, alone: bool) -> list[Finding]:
    """Return the findings on the fault with this number on the command line, all where it was alone."""
    if alone and fault.lasting:
        return findings
    return [f for f in findings if f.subject.step == step_of(index, fault.world)]


def score(fault: Fault, findings: list[Finding], script: Path) -> tuple[str, str]:
    """Score the findings on one fault: correct, inconclusive or wrong, and why."""
    if fault.kind is None:
        return ("correct", "silent") if not findings else ("wrong", findings[0].detail)
    if not findings:
        return "inconclusive", "no finding"
    # Building the graph may exceed the timeout of the forward phase: that finding is correct as well.
    relevant = [f for f in findings if not (fault.builds and f.subject.phase == "forward")]
    if not relevant:
        return "inconclusive", findings[0].detail
    scores = [_score(fault, finding, script) for finding in relevant]
    order = ("wrong", "correct", "inconclusive")
    return min(scores, key=lambda s: order.index(s[0]))


def _score(fault: Fault, finding: Finding, script: Path) -> tuple[str, str]:
    subject, claim = finding.subject, f"{finding.title}; {finding.detail}"
    if subject.verdict == "UNKNOWN":
        return "inconclusive", claim
    if subject.verdict != fault.kind:
        return "wrong", f"{subject.verdict} for {fault.kind}: {claim}"
    if fault.phase and subject.phase != fault.phase and fault.kind != "MISMATCH":
        return "wrong", f"phase {subject.phase} for {fault.phase}"
    if subject.rank is None:
        return "inconclusive", f"no rank: {claim}"
    if subject.rank != fault.rank:
        return "wrong", f"rank {subject.rank} for {fault.rank}: {claim}"
    if fault.line and subject.line != marked(script, fault.line):
        return ("inconclusive" if subject.line is None else "wrong"), f"line {subject.line}: {claim}"
    if fault.parameter and subject.parameter != fault.parameter:
        return ("inconclusive" if subject.parameter is None else "wrong"), f"parameter {subject.parameter}"
    if fault.pattern and not re.search(fault.pattern, claim):
        return "inconclusive", f"correct, but not the cause: {claim}"
    return "correct", claim


def step_of(index: int, world: int) -> int:
    """Return the step at which the fault with this number on the command line occurs."""
    return 3 * index + 2 if world == 1 else 2 * index + 1
