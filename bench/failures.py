"""Failures of the system around a watched training run, each injected once: what ``reliability.py`` counts.

Every failure runs a training script with ``backlight run`` and without, compares exit code and final weights,
and checks what the run directory says afterwards. ``site`` is code that Python runs at the start of each
process, before the script; ``fault`` is code of the script, called at each step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backlight import processes
from backlight.records import RunStatus
from backlight.store.read.run import Run, open_run

SCRIPT = """
import hashlib, os, sys, time
import torch
from fault import at
torch.manual_seed(0)
is_parallel = "RANK" in os.environ
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
trained = model
if is_parallel:
    # One store per start: in the launcher's store, ranks may find addresses of the start before.
    start = os.environ["TORCHELASTIC_RUN_ID"] + "-" + os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.distributed.init_process_group(
        "gloo", init_method="file://" + os.path.abspath("store-" + start),
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )
    trained = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[1])):
    at(step)
    x = torch.randn(64, 16)
    optimizer.zero_grad()
    (trained(x) - x[:, :2]).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
if is_parallel:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
if os.environ.get("RANK", "0") == "0":
    print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""

STEPS = 60
TIMEOUT_S = 300.0
CONSOLE = str(Path(sys.executable).with_name("backlight"))

WATCHDOG = """
import os, pathlib, signal
def watchdog(until=60.0):
    import time
    here, end = os.getcwd().encode(), time.monotonic() + until
    while time.monotonic() < end:
        for found in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = found.read_bytes()
            except OSError:
                continue
            if b"watchdog.process" in line and here in line and os.getppid() != int(found.parent.name):
                status = (found.parent / "status").read_text()
                if "PPid:\\t%d\\n" % os.getpid() not in status:  # the first half, which ends at once
                    return int(found.parent.name)
        time.sleep(0.05)
is_watched = "backlight" in __import__("sys").modules
"""
"""Finds the watchdog process of the run in the current directory."""


MEASURED: dict[str, str] = {}
"""What a failure adds to its line on the page."""


class SkippedError(Exception):
    """The machine does not permit the failure; the message is the reason."""


@dataclass
class Outcome:
    """What a failure led to; it is survived where there is no problem."""

    name: str
    problems: list[str] = field(default_factory=list)
    said: str = ""
    skipped: str = ""


@dataclass
class Training:
    """A training script in a directory of its own."""

    folder: Path
    fault: str = "def at(step): pass\n"
    site: str = ""
    ranks: int = 1
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    steps: int = STEPS
    out: str = "run"

    def start(self, *, watched: bool = True) -> subprocess.Popen[str]:
        """Start the script, in the directory."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "train.py").write_text(SCRIPT)
        (self.folder / "fault.py").write_text(self.fault)
        (self.folder / "site").mkdir(exist_ok=True)
        (self.folder / "site" / "sitecustomize.py").write_text(self.site)
        launcher = []
        if self.ranks > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *self.options]
            launcher += ["--nproc-per-node", str(self.ranks)]
        run = ["backlight", "run", "--out", self.out, "--every", "1"] if watched else []
        if launcher:
            command = [*launcher, *(["-m", *run] if watched else [])]
        else:
            command = [CONSOLE, *run[1:]] if watched else [sys.executable]
        paths = [str(self.folder / "site"), str(self.folder), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [*command, "train.py", str(self.steps)],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "PET_LOG_DIR": str(self.folder / "logs"), **self.environment,
            },
        )  # fmt: skip

    def compare(self) -> tuple[list[str], list[str]]:
        """Run the script with and without; return problems and backlight's warnings on standard error."""
        plain, expected, errors = self._ended(self.start(watched=False))
        if plain:
            raise SkippedError(f"the script alone ends with exit code {plain}")
        problems = []
        code, output, errors = self._ended(self.start())
        if code != plain:
            problems.append(f"exit code {code}, {plain} without backlight: {errors[-800:]}")
        if output != expected:
            problems.append("other weights than without backlight")
        if "Traceback" in errors:
            problems.append(f"a traceback: {errors[-800:]}")
        return problems, [line for line in errors.splitlines() if "RuntimeWarning: backlight: " in line]

    def _ended(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output, errors

    @property
    def run(self) -> Run:
        """The run that was recorded."""
        return open_run(self.folder / self.out)


def one_line(lines: list[str], text: str) -> list[str]:
    """Return what is wrong unless there is exactly one warning, with this text."""
    return [] if len(lines) == 1 and text in lines[0] else [f"expected one line with {text!r}, got {lines}"]


def whole(run: Run, last: int = STEPS - 1) -> list[str]:
    """Return what is wrong unless the run is finished and complete."""
    problems = [f"lost: {loss}" for loss in run.losses]
    if run.status is not RunStatus.FINISHED or run.last_step() != last:
        problems.append(f"status {run.status.value} after step {run.last_step()}")
    return problems


def unmeasured(run: Run, text: str) -> list[str]:
    """Return what is wrong unless the run says, once, that stalls are not measured."""
    reasons = [e.payload["reason"] for e in run.events("unmeasured") if e.payload["what"] == "stalls"]
    return [] if len(reasons) == 1 and text in reasons[0] else [f"expected one reason {text!r}: {reasons}"]


def stopped(run: Run, text: str, after: int) -> list[str]:
    """Return what is wrong unless recording stopped for this reason, later than step ``after``."""
    if not any("recording stopped after step" in loss and text in loss for loss in run.losses):
        return [f"expected a loss with {text!r}, got {run.losses}"]
    last = last_stored(run)
    return [] if after <= last < run.last_step() else [f"stored up to step {last} of {run.last_step()}"]


def last_stored(run: Run, rank: int = 0) -> int:
    """Return the last step whose gradients a rank has stored."""
    return int(run.frame("gradient", "norm", rank=rank).steps.max(initial=-1))


@contextlib.contextmanager
def tmpfs(target: Path, size: str) -> Iterator[None]:
    """Mount a small file system where this user may."""
    target.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(target)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SkippedError(f"this user may not mount a file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def disk_full(folder: Path) -> list[str]:
    """The file system of the run is full from step 20 on."""
    fill = f"{WATCHDOG}def at(step):\n    if is_watched and step == 20:\n"
    fill += "        try: open('small/x', 'wb').write(b'x' * 2**23)\n        except OSError: pass\n"
    with tmpfs(folder / "small", "4m"):
        training = Training(folder, fill, out="small/run", steps=STEPS * 4)
        problems, lines = training.compare()
        return problems + one_line(lines, "can no longer be written") + _full(training.run)


def _full(run: Run) -> list[str]:
    # After a step, or before the first one where the disk was full before anything was stored.
    is_stated = any("recording stopped" in loss and "full" in loss for loss in run.losses)
    return [] if is_stated else [f"the full disk is not stated: {run.losses}"]


def file_size_limit(folder: Path) -> list[str]:
    """No file may grow from step 100 on (RLIMIT_FSIZE), as with a quota."""
    limit = "import resource\ndef at(step):\n    if step == 100:\n"
    limit += "        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    training = Training(folder, limit, steps=4 * STEPS)
    problems, lines = training.compare()
    return problems + one_line(lines, "can no longer be written") + stopped(training.run, "disk", 10)


def directory_deleted(folder: Path) -> list[str]:
    """The run directory is deleted at step 20."""
    delete = "import shutil\ndef at(step):\n    if step == 20: shutil.rmtree('run', ignore_errors=True)\n"
    problems, lines = Training(folder, delete).compare()
    return problems + one_line(lines, "can no longer be written")


def shared_memory_full(folder: Path) -> list[str]:
    """Shared memory (``/dev/shm``) is full."""
    site = "import errno, os\ndef full(*_): raise OSError(errno.ENOSPC, 'No space left on device')\n"
    return _without_stalls(folder, f"{site}os.posix_fallocate = full\n", "No space left")


def shared_memory_closed(folder: Path) -> list[str]:
    """No directory for shared memory can be created."""
    site = """
import os
opened = os.open
def refuse(path, *args, **options):
    own = str(path).replace("backlight-failure-", "")  # the directory of this experiment
    if "backlight-" in own or "backlight/runtime" in own:
        raise PermissionError(13, "Permission denied", str(path))
    return opened(path, *args, **options)
os.open = refuse
"""
    environment = {"XDG_RUNTIME_DIR": "", "HOME": str(folder)}
    return _without_stalls(folder, site, "no directory for shared memory", environment)


def no_process(folder: Path) -> list[str]:
    """The watchdog process cannot be created."""
    site = """
import errno, subprocess
class Popen(subprocess.Popen):
    def __init__(self, args, *more, **options):
        if any("watchdog.process" in str(one) for one in args):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        super().__init__(args, *more, **options)
subprocess.Popen = Popen
"""
    return _without_stalls(folder, site, "Resource temporarily unavailable")


def watchdog_ends_at_once(folder: Path) -> list[str]:
    """The watchdog process ends while it starts."""
    site = "import os, sys\nif any('watchdog.process' in a for a in sys.orig_argv): os._exit(3)\n"
    return _without_stalls(folder, site, "has not started (exit code 3)")


def _without_stalls(
    folder: Path, site: str, text: str, environment: dict[str, str] | None = None
) -> list[str]:
    training = Training(folder, site=site, environment=environment or {}, steps=STEPS * 4)
    problems, lines = training.compare()
    run = training.run
    return problems + one_line(lines, text) + whole(run, STEPS * 4 - 1) + unmeasured(run, text)


def no_locks(folder: Path) -> list[str]:
    """The file system has no locks (``flock`` returns ENOLCK, as on some NFS mounts)."""
    site = "import errno, fcntl\ndef flock(*_): raise OSError(errno.ENOLCK, 'No locks available')\n"
    training = Training(folder, site=f"{site}fcntl.flock = flock\n")
    problems, lines = training.compare()
    return problems + [f"a warning: {line}" for line in lines] + whole(training.run)


def clock_jumps(folder: Path) -> list[str]:
    """The system clock jumps by days, forwards and backwards."""
    site = """
import time
now, calls = time.time, [0]
def jumping():
    calls[0] += 1
    return now() + (0, 90_000, -90_000, 10**7, -(10**7))[calls[0] // 20 % 5]
time.time = jumping
"""
    training = Training(folder, site=site)
    problems, lines = training.compare()
    run = training.run
    (attempt,) = run.attempts
    took_s = (attempt.ended or 0.0) - attempt.started
    wrong = [] if 0 < took_s < TIMEOUT_S else [f"the run took {took_s:g} s"]
    return problems + [f"a warning: {line}" for line in lines] + whole(run) + wrong


def descriptors_closed(folder: Path) -> list[str]:
    """The script closes all descriptors at step 20 (``os.closerange``), and opens files of its own."""
    close = """
import os
files = []
def at(step):
    if step == 20:
        os.closerange(3, 256)
        for number in range(40):
            files.append(open(f"own-{number}", "w+b"))
            files[-1].write(b"x" * 99_999)
            files[-1].flush()
    for file in files:
        file.seek(0)
        assert file.read() == b"x" * 99_999
"""
    training = Training(folder, close, steps=STEPS * 4)
    problems, lines = training.compare()
    run = training.run
    if run.status is not RunStatus.FINISHED:
        problems.append(f"status {run.status.value}")
    return problems + one_line(lines, "has closed the descriptors") + stopped_at(run, 10)


def stopped_at(run: Run, after: int) -> list[str]:
    """Return what is wrong unless the run says that recording stopped."""
    is_stated = any("has closed the descriptors" in loss for loss in run.losses)
    return [] if is_stated and run.last_step() >= after else [f"{run.losses}, last step {run.last_step()}"]


def many_at_once(folder: Path, count: int = 50) -> list[str]:
    """50 runs start at once in one directory."""
    training = Training(folder, steps=5)
    expected = training.start(watched=False).communicate(timeout=TIMEOUT_S)[0]
    training.out = ""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    started = [
        subprocess.Popen(
            [CONSOLE, "run", "--every", "1", "train.py", "5"],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(count)
    ]  # fmt: skip
    problems = []
    for process in started:
        output, errors = process.communicate(timeout=4 * TIMEOUT_S)
        if (process.returncode, output) != (0, expected):
            problems.append(f"exit code {process.returncode}: {errors[-300:]}")
    runs = [open_run(path) for path in sorted((folder / "runs").iterdir())]
    if len(runs) != count:
        problems.append(f"{len(runs)} run directories for {count} runs")
    return problems + [problem for run in runs for problem in whole(run, 4)]


def rank_with_a_full_disk(folder: Path) -> list[str]:
    """The disk of one rank of two is full from step 100 on."""
    limit = "import os, resource\ndef at(step):\n    if step == 100 and os.environ['RANK'] == '1':\n"
    limit += "        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    training = Training(folder, limit, ranks=2, steps=4 * STEPS)
    problems, lines = training.compare()
    run = training.run
    last = [last_stored(run, rank) for rank in range(2)]
    if last[0] != 4 * STEPS - 1 or not 10 <= last[1] < last[0]:
        problems.append(f"stored up to steps {last}")
    is_stated = any("rank 1: recording stopped after step" in loss for loss in run.losses)
    problems += [] if is_stated else [f"the loss of rank 1 is not stated: {run.losses}"]
    return problems + one_line(lines, "can no longer be written")


def watchdog_killed(folder: Path) -> list[str]:
    """The watchdog process is killed under torchrun."""
    kill = f"{WATCHDOG}def at(step):\n    if is_watched and step == 20 and os.environ['RANK'] == '0':\n"
    kill += "        os.kill(watchdog(), signal.SIGKILL)\n"
    training = Training(folder, kill, ranks=2, steps=STEPS * 4)
    problems, lines = training.compare()
    run = training.run
    reasons = {e.payload["reason"] for e in run.events("unmeasured") if e.payload["what"] == "stalls"}
    problems += [] if reasons == {"the watchdog process has ended"} else [f"reasons {reasons}"]
    return problems + one_line(lines, "the watchdog process has ended") + whole(run, STEPS * 4 - 1)


def elastic_restart(folder: Path) -> list[str]:
    """A launcher (torchrun) restarts its ranks after one of them failed (``--max-restarts``)."""
    fail = "import os\ndef at(step):\n    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
    fail += "    if step == 20 and first and os.environ['RANK'] == '1': os._exit(3)\n"
    training = Training(folder, fail, ranks=2, options=("--max-restarts", "1"))
    problems, _ = training.compare()
    run = training.run
    if len(run.attempts) != 2:
        return [*problems, f"{len(run.attempts)} attempts"]
    first, second = run.attempts
    again = run.frame("gradient", "norm", attempt=1).steps - second.step_offset
    if second.status is not RunStatus.FINISHED or again.tolist() != list(range(STEPS)):
        problems.append(f"the second attempt is {second.status.value}, with steps {again.tolist()}")
    if first.status is RunStatus.FINISHED or len(run.frame("gradient", "norm", attempt=0).steps) > 20:
        problems.append(f"the first attempt is {first.status.value}")
    return problems


def training_killed(folder: Path) -> list[str]:
    """The training process is killed; its watchdog process ends as well."""
    kill = f"{WATCHDOG}def at(step):\n    if is_watched and step == 20:\n"
    kill += "        open('pid', 'w').write(str(watchdog()))\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    training = Training(folder, kill)
    process = training.start()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    pid, began = int((folder / "pid").read_text()), time.monotonic()
    while processes.is_alive(pid) and time.monotonic() - began < 60:  # it may wait long to be reaped
        time.sleep(0.02)
    problems = [f"the watchdog outlives its run: {errors}"] if processes.is_alive(pid) else []
    MEASURED["training_killed"] = f" within {time.monotonic() - began:.1f} s"
    run = training.run
    return problems + ([] if run.status is RunStatus.KILLED else [f"status {run.status.value}"])


def stuck_watchdog(folder: Path) -> list[str]:
    """The watchdog process is stuck: what reads the script's output ends with the script."""
    stop = f"{WATCHDOG}def at(step):\n    if is_watched and step == 20:\n        found = watchdog()\n"
    stop += "        open('pid', 'w').write(str(found)); os.kill(found, signal.SIGSTOP)\n"
    training = Training(folder, stop)
    try:
        process = training.start()
        process.communicate(timeout=TIMEOUT_S)  # returns when no process holds the pipes any more
    except subprocess.TimeoutExpired:
        return ["a pipe of the script is still open"]
    finally:
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    return ([] if process.returncode == 0 else [f"exit code {process.returncode}"]) + whole(training.run)


FAILURES: dict[str, Callable[[Path], list[str]]] = {
    one.__name__: one
    for one in (
        disk_full, file_size_limit, directory_deleted, shared_memory_full, shared_memory_closed, no_process,
        watchdog_ends_at_once, no_locks, clock_jumps, descriptors_closed, many_at_once, rank_with_a_full_disk,
        watchdog_killed, elastic_restart, training_killed, stuck_watchdog,
    )
}  # fmt: skip
"""Each failure, whose docstring is its line on the page."""


def inject(name: str, folder: Path) -> Outcome:
    """Inject one failure in an empty folder."""
    failure = FAILURES[name]
    outcome = Outcome(name, said=str(failure.__doc__))
    try:
        outcome.problems = failure(folder)
        outcome.said = outcome.said.rstrip(".") + MEASURED.get(name, "")
    except SkippedError as reason:
        outcome.skipped = str(reason)
    except Exception as error:  # noqa: BLE001 - a failure that is not survived
        outcome.problems = [f"{type(error).__name__}: {error}"]
    return outcome
