"""What processes wait for by the state of the system, each with the real library, and with progress."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backlight import processes
from backlight.records import DiagnosisKind
from backlight.store.read.run import open_run
from backlight.watchdog import waits
from backlight.watchdog.attach import attach, attach_job, observe
from backlight.watchdog.stacks import Frame, ThreadStack, dump_by_py_spy
from backlight.watchdog.text import describe
from backlight.watchdog.waits import INPUT, TABLE, WaitName, name_wait
from observed_processes import (
    PY_SPY,
    Start,
    diagnosed,
    free_port,
    next_line,
    tell,
    wait_until,
    wait_until_computing,
    wait_until_idle,
    wait_until_in,
)

pytestmark = [pytest.mark.alone, PY_SPY]

FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW

# Workers of a compiler


COMPILE = """
    import os, sys, time
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    sys.path.insert(0, sys.argv[1])
    import jobs
    config.compile_threads, config.worker_start_method = 2, "subprocess"
    pool = AsyncCompile.process_pool()
    print(pool.process.pid, flush=True)
    AsyncCompile().wait({"kernel": pool.submit(jobs.job, sys.argv[1])})
"""
JOBS = """
    import pathlib, time
    def job(directory):
        while not (pathlib.Path(directory) / "idle").exists():
            pass
        time.sleep(600)
"""


@pytest.mark.full
def test_compile_workers(start: Start, tmp_path: Path) -> None:
    """One that computes is no finding; an idle one is, and so is a pool that was killed."""
    (tmp_path / "jobs.py").write_text("\n".join(line[4:] for line in JOBS.splitlines()))
    process = start(COMPILE, tmp_path)
    pool = int(next_line(process))
    wait_until_in(process, "_wait_futures")
    wait_until(lambda: any(p.parent == pool for p in processes.read_process_table().values()), "a worker")
    workers = [p.pid for p in processes.read_process_table().values() if p.parent == pool]
    try:
        wait_until(lambda: any(is_computing(pid) for pid in workers), "a worker computes")
        found = diagnosed(process)
        assert found.kind is DiagnosisKind.PASS, found.claim
        assert f"it waits for workers that compile; process {pool} runs them, and computes" in found.claim
        (tmp_path / "idle").touch()
        for pid in (*workers, pool):
            wait_until_idle(pid)
        found = diagnosed(process)
        assert (found.kind, "none of its processes computes" in found.claim) == (DiagnosisKind.BLOCKED, True)
        os.kill(pool, signal.SIGKILL)
        found = diagnosed(process)
        assert found.kind is DiagnosisKind.BLOCKED
        assert f"none of them lives: process {pool} was killed by SIGKILL" in found.claim
        assert "TORCHINDUCTOR_COMPILE_THREADS=1" in found.next_check
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_computing(pid: int) -> bool:
    return bool(waits._computing([pid]))


# Workers of a data loader


LOADER = """
    import os, pathlib, signal, sys, time, torch
    from torch.utils.data import DataLoader, Dataset
    directory = pathlib.Path(sys.argv[1])
    exec(compile((directory / "images.py").read_text(), str(directory / "images.py"), "exec"))
    loader = iter(DataLoader(Data(), num_workers=1, timeout=600, multiprocessing_context="fork"))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # with torch's own handler the death of a worker raises
    next(loader)
"""

LOCKED = """
    import multiprocessing, os, pathlib, sys, time
    from torch.utils.data import DataLoader, Dataset
    path = pathlib.Path(sys.argv[1]) / "records.py"
    exec(compile(path.read_text(), str(path), "exec"))
    for batch in DataLoader(Data(), num_workers=2, timeout=600, multiprocessing_context="fork"):
        print("batch", flush=True)
"""

RECORDS = """
lock = multiprocessing.Lock()
class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        if i == 3:
            with lock:
                {first}
        elif i == 4:
            time.sleep(0.5)
            {other}
        return i
"""

IMAGES = """
class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        print(os.getpid(), flush=True)
        held = []
        while not (directory / "idle").exists():
            if (directory / "memory").exists():
                held.append(bytearray(8 << 20))
        time.sleep(600)
"""


@pytest.fixture
def loading(tmp_path: Path) -> Path:
    """A folder with the data set of :data:`LOADER`, in a file as code of a user is."""
    (tmp_path / "images.py").write_text(IMAGES)
    return tmp_path


def test_worker_of_a_loader_that_was_killed(start: Start, loading: Path) -> None:
    process = start(LOADER, loading)
    worker = int(next_line(process))
    wait_until_computing(worker)
    wait_until_in(process, "dataloader.py")
    found = diagnosed(process)  # the control: the same frames
    assert (found.kind, found.claim.startswith(f"PASS: it waits for worker {worker} of the data loader")) == (
        DiagnosisKind.PASS,
        True,
    )
    assert "which computes at images.py:" in found.claim  # and its line
    os.kill(worker, signal.SIGKILL)
    found = diagnosed(process)
    assert found.kind is DiagnosisKind.BLOCKED
    assert f"worker {worker} of the data loader, which was killed by SIGKILL" in found.claim


@pytest.mark.parametrize(
    ("first", "other", "is_named"),
    [
        ("lock.acquire()", "pass", True),
        (
            "time.sleep(600)",
            "lock.acquire()",
            False,
        ),  # the control: the worker that holds it may only be slow
    ],
)
def test_worker_of_a_loader_in_a_lock_of_the_script(
    first: str, other: str, is_named: bool, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "records.py").write_text(RECORDS.format(first=first, other=other))
    process = start(LOCKED, tmp_path)
    for _ in range(3):
        next_line(process)
    wait_until_in(process, "dataloader.py")
    time.sleep(1.0)
    workers = [c.pid for c in processes.children(process.pid) if c.name == waits.LOADER_WORKER]
    obs, cause = observe(process.pid, 0.8)
    assert len(workers) == 2
    assert (obs.cause is not None) is is_named
    assert cause.kind is DiagnosisKind.BLOCKED
    text = describe(cause)
    assert "at records.py:9 in Data.__getitem__" in text.claim
    assert obs.workers is not None
    assert {worker.pid for worker in obs.workers.stacks} <= set(workers)
    if is_named:
        assert f"worker {workers[1]} of the data loader, which waits for a lock at records.py:9" in text.claim
        assert "take it by `with`, once per sample" in text.next_check


@pytest.mark.full
def test_worker_of_a_loader_that_idles_has_no_cause(start: Start, loading: Path) -> None:
    """One that sleeps may be anything: the wait gets no name, and no progress is claimed."""
    (loading / "idle").touch()
    process = start(LOADER, loading)
    worker = int(next_line(process))
    wait_until_idle(worker)
    wait_until_in(process, "dataloader.py")
    obs, cause = observe(process.pid, 0.8)
    assert (obs.cause, cause.kind) == (None, DiagnosisKind.BLOCKED)
    text = describe(cause)
    assert (
        f"for worker {worker} of the data loader, which sleeps at images.py:11 in Data." in text.claim
    )  # where it is, all the same
    assert text.next_check == "find out what should end this wait at images.py:11 in Data.__getitem__"


EXHAUSTED = """
    import os
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
    class Data(IterableDataset):
        def __iter__(self):
            if get_worker_info().id:
                print(os.getpid(), flush=True)
                while True:
                    pass
            return iter([])
    for _ in DataLoader(Data(), num_workers=2, multiprocessing_context="fork"):
        pass
"""


@pytest.mark.full
def test_worker_that_has_no_more_data_is_no_dead_one(start: Start) -> None:
    process = start(EXHAUSTED)
    worker = int(next_line(process))
    wait_until(lambda: any(c.is_dead for c in processes.children(process.pid)), "the other one has ended")
    wait_until_idle(process.pid)
    found = diagnosed(process)
    assert found.kind is DiagnosisKind.PASS, found.claim
    assert f"it waits for worker {worker} of the data loader, which computes" in found.claim


@pytest.mark.full
@pytest.mark.parametrize("kills", [4, 3], ids=["counted", "not counted"])
def test_kills_for_memory_are_counted(
    kills: int, start: Start, loading: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that SIGKILL ended: for memory only where the control group has counted one since."""
    process = start(LOADER, loading)
    worker = int(next_line(process))
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: any(c.is_dead for c in processes.children(process.pid)), "the worker is dead")
    monkeypatch.setattr(processes, "count_oom_kills", lambda: kills)
    stack = ThreadStack(1, (Frame("/lib/torch/utils/data/dataloader.py", 1, "_try_get_data"),))
    wait_until(lambda: not waits._runs(process.pid, process.pid), "the script waits")
    cause = name_wait(process.pid, process.pid, stack, oom_kills_before=3)
    assert cause is not None
    assert cause.name is (WaitName.KILLED_WORKER if kills > 3 else WaitName.DEAD_WORKER)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with little memory, where this user may make one."""
    base = Path("/sys/fs/cgroup")
    parent = base / "memory" if (base / "memory").is_dir() else base
    group = parent / f"backlight-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    try:
        limit = next(
            (group / n for n in ("memory.limit_in_bytes", "memory.max") if (group / n).exists()), None
        )
        if limit is None:
            pytest.skip("the control groups of this machine do not limit memory")
        limit.write_text(str(96 << 20))
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "the control group is empty")
        group.rmdir()


@pytest.mark.full
def test_worker_that_the_kernel_killed_for_memory(start: Start, small_group: Path, loading: Path) -> None:
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the log of the kernel may not be read")
    process = start(LOADER, loading)
    worker = int(next_line(process))
    wait_until_in(process, "dataloader.py")
    (small_group / "cgroup.procs").write_text(str(worker))
    (loading / "memory").touch()
    wait_until(lambda: any(c.is_dead for c in processes.children(process.pid)), "the worker is dead")
    found = diagnosed(process)
    assert found.kind is DiagnosisKind.BLOCKED
    assert f"worker {worker} of the data loader, which the kernel killed for memory" in found.claim
    assert "use fewer workers" in found.next_check


# Storage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that can be frozen, where this user may mount one."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    image.write_bytes(bytes(8 << 20))
    mount.mkdir()
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, mount]):
        program = shutil.which(str(command[0]), path=path)
        done = subprocess.run([program, *command[1:]], capture_output=True, check=False) if program else None
        if done is None or done.returncode:
            pytest.skip(f"no file system can be mounted: {command[0]} is missing or fails")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


@contextlib.contextmanager
def frozen(mount: Path) -> Iterator[None]:
    descriptor = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, FREEZE, 0)
        yield
    finally:
        fcntl.ioctl(descriptor, THAW, 0)
        os.close(descriptor)


WRITE = """
    import sys, time
    def save(file):
        while True:
            file.seek(0)
            file.write(b"x" * 4096)
            file.flush()
    with open(sys.argv[1], "wb") as file:
        save(file)
"""


def test_write_to_storage_that_does_not_return(start: Start, storage: Path) -> None:
    """A write to a frozen file system waits in state D, where py-spy is not asked for native stacks."""
    file = storage / "checkpoint.pt"
    process = start(WRITE, file)
    wait_until_in(process, "save")
    with frozen(storage):
        wait_until(lambda: state_of(process.pid) == "D", "the write waits")
        diagnosis = diagnosed(process)
        sample, reason = dump_by_py_spy(process.pid, native=True)
    assert diagnosis.kind is DiagnosisKind.BLOCKED
    assert f"its wait on {file} (state D)" in diagnosis.claim
    assert (sample, "no tracer can interrupt" in reason) == (None, True)
    # The control: the same frames, while the storage answers.
    wait_until_computing(process.pid)
    assert state_of(process.pid) in {"R", "S", "D"}
    assert observe(process.pid, 0.8)[0].cause is None


def state_of(pid: int) -> str:
    return next((t.state for t in processes.read_threads(pid) if t.tid == pid), "")


CHECKPOINT = """
    import sys, torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1000):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step >= 3:
            torch.save(model.state_dict(), sys.argv[1])
            print("saved", flush=True)
            sys.stdin.readline()
"""


@pytest.mark.full
def test_watchdog_reports_a_checkpoint_that_is_not_written(storage: Path, tmp_path: Path) -> None:
    script, out, config = tmp_path / "train.py", tmp_path / "run", tmp_path / "limits.toml"
    script.write_text(textwrap.dedent(CHECKPOINT))
    config.write_text("[thresholds.stalls]\nfloor_checkpoint = 2.0\n")
    options = ["--monitors", "stalls", "--config", config, "--out", out]
    with subprocess.Popen(
        [sys.executable, "-m", "backlight", "run", *options, script, storage / "x.pt"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            assert next_line(process) == "saved"
            with frozen(storage):
                tell(process)
                wait_until(lambda: bool(open_run(out).stored_findings()), "the watchdog reports it")
                attached = attach(process.pid, 0.8)
            (found,) = open_run(out).stored_findings()
            assert (found.subject.verdict, found.subject.phase) == ("BLOCKED", "checkpoint")
            assert "(state D)" in f"{found.title} {found.detail}"
            assert found.subject.line == f"{script}:9"
            assert "(state D)" in attached.diagnosis.claim
        finally:
            process.kill()


READ_IN_WORKER = """
    import os, sys, torch
    from torch.utils.data import DataLoader, Dataset
    class Data(Dataset):
        def __len__(self):
            return 1 << 30
        def __getitem__(self, i):
            with open(sys.argv[1], "wb") as file:
                file.write(b"x")
            return i
    for i in DataLoader(Data(), num_workers=1, prefetch_factor=1, multiprocessing_context="fork"):
        if not int(i):
            print("first", flush=True)
"""


@pytest.mark.full
def test_worker_whose_storage_does_not_answer(start: Start, storage: Path) -> None:
    process = start(READ_IN_WORKER, storage / "cache")
    assert next_line(process) == "first"
    with frozen(storage):
        (worker,) = [c for c in processes.children(process.pid) if c.name == waits.LOADER_WORKER]
        wait_until(lambda: state_of(worker.pid) == "D", "the worker waits")
        wait_until_idle(process.pid)
        found = diagnosed(process)
    assert found.kind is DiagnosisKind.BLOCKED
    assert f"it waits for worker {worker.pid} of the data loader, whose own wait" in found.claim
    assert attach(process.pid, 0.8).diagnosis.kind is not DiagnosisKind.BLOCKED  # the control


# Locks of a cache

HELD = {
    "filelock": "import sys, filelock; lock = filelock.FileLock(sys.argv[1])",
    "huggingface_hub": "import sys; from huggingface_hub.utils import WeakFileLock; "
    "lock = WeakFileLock(sys.argv[1])",
    "datasets": "import sys; from datasets.utils._filelock import FileLock; lock = FileLock(sys.argv[1])",
}


@pytest.mark.full
@pytest.mark.parametrize("package", ["huggingface_hub", "datasets"])
def test_lock_of_hugging_face(package: str, start: Start, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    lock = tmp_path / "model.lock"
    code = f"{HELD[package]}\nwith lock: print('held', flush=True);"
    holder = start(f"{code} sys.stdin.readline(); exec('while True: pass')", lock)
    assert next_line(holder) == "held"
    process = start(code, lock)
    wait_until_in(process, "_poll_until_acquired")
    found = diagnosed(process)
    assert found.kind is DiagnosisKind.BLOCKED
    assert f"file lock {lock} of a cache; process {holder.pid} holds it, and does not" in found.claim
    tell(holder)  # the control: the same frames, while the holder downloads or converts
    wait_until_computing(holder.pid)
    found = diagnosed(process)
    assert found.kind is DiagnosisKind.PASS
    assert f"process {holder.pid} holds it, and computes" in found.claim


# Controls: the same frames while progress is made


def test_breakpoint_at_which_a_command_computes(start: Start) -> None:
    process = start("def main():\n    breakpoint()\nmain()")
    wait_until_in(process, "pdb.py")
    wait_until_idle(process.pid)
    assert "waits at a breakpoint" in diagnosed(process).claim
    assert process.stdin is not None
    process.stdin.write("while True: pass\n")
    process.stdin.flush()
    wait_until_computing(process.pid)
    obs, cause = observe(process.pid, 0.8)
    assert (obs.cause, cause.kind) == (None, DiagnosisKind.UNKNOWN)


@pytest.mark.full
def test_input_of_a_pipe_whose_writer_computes(start: Start) -> None:
    writer = start("import sys\nsys.stdin.readline()\nwhile True: pass")
    reader = subprocess.Popen([sys.executable, "-c", "def main():\n    input()\nmain()"], stdin=writer.stdout)
    try:
        wait_until_in(reader, "main")  # type: ignore[arg-type]  # bytes or text: nothing is read
        wait_until_idle(reader.pid)
        found = attach(reader.pid, 0.8).diagnosis
        assert found.kind is DiagnosisKind.BLOCKED
        tell(writer)
        wait_until_computing(writer.pid)
        found = attach(reader.pid, 0.8).diagnosis
        assert found.kind is DiagnosisKind.PASS, found.claim
        assert f"process {writer.pid}, which computes" in found.claim
    finally:
        reader.kill()
        reader.wait()


@pytest.mark.full
def test_rank_that_is_still_starting(start: Start) -> None:
    """Rendezvous and creation of a group are no finding while a rank of this machine is on its way."""
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = "import torch.distributed as dist; dist.init_process_group('gloo')"
    first, second = (start(code, RANK=rank, **job) for rank in "01")
    late = start("import sys\nsys.stdin.readline()\nwhile True: pass", RANK="2", **job)
    wait_until_in(first, "_create_c10d_store")
    wait_until_in(second, "_new_process_group_helper")
    for process in (first, second, late):
        wait_until_idle(process.pid)
    assert "rendezvous for ranks that have not come" in diagnosed(first).claim
    assert "for all ranks to create a process group" in diagnosed(second).claim
    tell(late)
    wait_until_computing(late.pid)
    for process in (first, second):
        found = diagnosed(process)
        assert found.kind is DiagnosisKind.PASS, found.claim
        assert f"rank 2 (process {late.pid}) computes" in found.claim
    assert attach_job(first.pid, 0.8).diagnosis.kind is DiagnosisKind.PASS


@pytest.mark.full
def test_node_that_does_not_come_to_torchrun(start: Start, tmp_path: Path) -> None:
    """The launcher of one node of two; the control is that the other one comes."""
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(600)")
    code = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
    node = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", script)
    first = start(code, *node)
    wait_until_in(first, "next_rendezvous")
    wait_until_idle(first.pid)
    found = diagnosed(first)
    assert found.kind is DiagnosisKind.BLOCKED
    assert "in the rendezvous of torchrun for nodes that have not come" in found.claim
    second = start(code, *node)
    workers: list[int] = []

    def has_workers() -> bool:
        children = [c.pid for agent in (first, second) for c in processes.children(agent.pid)]
        workers[:] = [pid for pid in children if str(script) in processes.command_line(pid)]
        return len(workers) == 2

    try:
        wait_until(has_workers, "both nodes have started their script")
        assert observe(first.pid, 0.8)[0].cause is None
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)


def test_thread_that_computes_waits_for_nothing(start: Start) -> None:
    """Every row of the table, on the stack of a thread that computes."""
    process = start("while True: pass")
    wait_until_computing(process.pid)
    for row in (*TABLE, INPUT):
        function = row.functions[0] if row.functions else "any"
        frame = Frame(f"/lib/{row.file}", 1, function)
        stack = ThreadStack(1, (frame,), called="input" if row is INPUT else "")
        assert name_wait(process.pid, process.pid, stack) is None, row.name
