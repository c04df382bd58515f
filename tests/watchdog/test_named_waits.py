"""Waits with a name, each with the real library in a process, and the same frames with progress."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed
from torch.utils import cpp_extension

from backlight import processes
from backlight.distributed import ProcessNotFoundError
from backlight.records import DiagnosisKind
from backlight.store.read.run import open_run
from backlight.watchdog.attach import attach, attach_job, ranks_in_store
from backlight.watchdog.stacks import Frame, ThreadStack
from backlight.watchdog.waits import TABLE, find_named_wait
from backlight.watchdog.words import STARVED
from observed_processes import (
    PY_SPY,
    Start,
    diagnosed,
    free_port,
    wait_until,
    wait_until_computing,
    wait_until_idle,
    wait_until_in,
)

pytestmark = [pytest.mark.alone, PY_SPY]

EXTENSION = """
    import sys
    from torch.utils import cpp_extension
    code = "int f(int a) { return a; }"
    cpp_extension.load_inline("demo", code, functions=["f"], build_directory=sys.argv[1])
"""


def test_build_lock_that_a_killed_build_left(start: Start, tmp_path: Path) -> None:
    if not hasattr(cpp_extension, "FileBaton"):
        pytest.skip("this torch holds builds by a lock that ends with its process")
    lock = tmp_path / "lock"
    lock.touch()
    process = start(EXTENSION, tmp_path)
    wait_until_in(process, "file_baton.py")
    found = diagnosed(process)
    assert found.kind is DiagnosisKind.BLOCKED
    assert f"the build lock of a torch extension, {lock}; no process of this machine holds it" in found.claim
    assert found.next_check.startswith(f"delete {lock}")
    # The control: the same frames, while the process that holds the lock builds.
    builder = start("import sys; held = open(sys.argv[1])\nwhile True: pass", lock)
    wait_until_in(builder, "<module>")
    found = diagnosed(process)
    assert found.kind is DiagnosisKind.PASS
    assert f"process {builder.pid} holds it, and computes" in found.claim


def test_file_lock_of_a_cache(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("filelock")
    lock = tmp_path / "data.lock"
    code = "import sys, filelock; l = filelock.FileLock(sys.argv[1]); l.acquire(); print('held', flush=True)"
    holder = start(f"{code}\nwhile not sys.stdin.readline(): pass\nwhile True: pass", lock)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert processes.lock_holders(lock) == [holder.pid]
    process = start(code, lock)
    wait_until_in(process, "_poll_until_acquired")
    found = diagnosed(process)
    assert found.kind is DiagnosisKind.BLOCKED
    assert (
        f"the file lock {lock} of a cache; process {holder.pid} holds it, and does not compute" in found.claim
    )
    assert holder.stdin is not None
    holder.stdin.write("go on\n")
    holder.stdin.flush()
    wait_until_computing(holder.pid)
    assert diagnosed(process).kind is DiagnosisKind.PASS


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "part", "words"),
    [
        ("def main():\n    breakpoint()\nmain()", "pdb.py", "waits at a breakpoint"),
        ("def main():\n    input('name? ')\nmain()", "main", "waits in input() for a pipe"),
    ],
)
def test_prompt(code: str, part: str, words: str, start: Start) -> None:
    process = start(code)
    wait_until_in(process, part)
    wait_until_idle(process.pid)
    found = diagnosed(process)
    assert (found.kind, words in found.claim) == (DiagnosisKind.BLOCKED, True), found.claim


@pytest.mark.full
def test_rendezvous_and_creation_of_a_group_wait_for_a_rank(start: Start) -> None:
    """Rank 2 of three does not come: rank 0 waits in the store, rank 1 in the creation of the group."""
    code = "import torch.distributed as dist; dist.init_process_group('gloo')"
    first, second = started_job(start, code, 2, 3)
    wait_until_in(first, "_create_c10d_store")
    assert "in the rendezvous for ranks that have not come" in diagnosed(first).claim
    wait_until_in(second, "_new_process_group_helper")
    assert "for all ranks to create a process group" in diagnosed(second).claim


OPENMP = """
    import torch
    torch.set_num_threads(2)
    def work():
        torch.set_num_threads(2)
        return (torch.ones(2000, 2000).exp() + 1).sum()
"""
TOKENIZERS = """
    from tokenizers import Tokenizer, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    def work():
        return len(tokenizer.encode_batch(["a a a"] * 1000))
"""
IN_A_WORKER = """
    from torch.utils.data import DataLoader, Dataset
    class Data(Dataset):
        def __len__(self): return 2
        def __getitem__(self, i): return work()
    work()
    for _ in DataLoader(Data(), num_workers=1, multiprocessing_context="fork"):
        pass
    print("done", flush=True)
    input()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("library", "code", "fix"),
    [
        ("OpenMP", OPENMP, "call torch.set_num_threads(1)"),
        ("tokenizers", TOKENIZERS, "set TOKENIZERS_PARALLELISM=false"),
    ],
)
def test_worker_in_a_lock_that_it_inherited(library: str, code: str, fix: str, start: Start) -> None:
    """The threads of the library do not survive a fork: a worker waits for those of its parent."""
    if library == "tokenizers":
        pytest.importorskip("tokenizers")
    process = start(f"{code}{IN_A_WORKER}", TOKENIZERS_PARALLELISM="true")
    wait_until(lambda: bool(processes.children(process.pid)), "the worker is there")
    wait_until_in(process, "dataloader.py")
    for worker in processes.children(process.pid):
        wait_until_idle(worker.pid)
    found = [diagnosed(process)]
    if "input()" in found[-1].claim:
        pytest.skip(f"this build of {library} survives a fork")

    def is_named() -> bool:  # on a busy machine py-spy may not answer in time
        found.append(diagnosed(process))
        return f"which is in a lock of {library} that it inherited by fork" in found[-1].claim

    wait_until(is_named, "the lock has a name")
    assert fix in found[-1].next_check


@pytest.mark.full
def test_uninterruptible_wait(start: Start, tmp_path: Path) -> None:
    """A parent in vfork waits in state D until its child ends, as a write to storage does."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler")
    source, library = tmp_path / "wait.c", tmp_path / "wait.so"
    source.write_text("#include <unistd.h>\nvoid hold(void) { if (vfork() == 0) { sleep(30); _exit(0); } }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    process = start("import ctypes, sys\ndef main(): ctypes.CDLL(sys.argv[1]).hold()\nmain()", library)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and all(t.state != "D" for t in processes.read_threads(process.pid)):
        time.sleep(0.1)
    found = attach(process.pid, 0.8, native=False).diagnosis
    assert "the kernel does not interrupt its wait" in found.claim
    for child in processes.children(process.pid):
        os.kill(child.pid, 9)


def test_innermost_frame_decides() -> None:
    deep = tuple(Frame("/home/me/train.py", n, "step") for n in range(20))
    baton = Frame("/lib/torch/utils/file_baton.py", 50, "FileBaton.wait")
    assert find_named_wait(ThreadStack(1, (baton, *deep))) is not None
    assert find_named_wait(ThreadStack(1, (*deep, baton))) is None
    assert {row.name for row in TABLE} >= {"extension_lock", "file_lock", "rendezvous", "group_creation"}


JOB = """
    import os, sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_rank() == 1 and "sleep" in sys.argv:
        time.sleep(600)
    while True:
        dist.all_reduce(torch.ones(4))
        time.sleep(0.05)
"""


def started_job(
    start: Start, code: str, ranks: int, world: int, *arguments: str
) -> list[subprocess.Popen[str]]:
    job = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start(code, *arguments, RANK=str(rank), **job) for rank in range(ranks)]


def test_job_whose_rank_sleeps(start: Start) -> None:
    job = started_job(start, JOB, 3, 3, "sleep")
    wait_until_in(job[0], "all_reduce")
    wait_until_in(job[2], "all_reduce")
    found = attach_job(job[0].pid, 0.8)
    assert {group.ranks: group.in_collective for group in found.groups} == {(0, 2): True, (1,): False}
    assert (found.diagnosis.rank, found.pids[1], found.elsewhere) == (1, job[1].pid, ())
    assert "Rank 0, 2 wait for it" in found.diagnosis.claim


def test_job_that_moves_names_no_rank(start: Start) -> None:
    """The control: at any moment some ranks are in a collective and others are not."""
    code = JOB.replace(
        "time.sleep(0.05)", "sum(range(300_000)); sorted(range(200_000)); list(range(200_000))"
    )
    job = started_job(start, code, 2, 2)
    wait_until_in(job[0], "<module>")
    wait_until_in(job[1], "<module>")
    found = attach_job(job[0].pid, 0.8)
    assert found.diagnosis.kind in {DiagnosisKind.PASS, DiagnosisKind.UNKNOWN}
    assert found.diagnosis.rank is None


def test_job_whose_rank_does_not_come(start: Start) -> None:
    """Rank 2 is not started: its name follows from the processes, and from the keys in the store."""
    job = started_job(start, JOB, 2, 3)
    wait_until_in(job[0], "_create_c10d_store")
    wait_until_in(job[1], "_new_process_group_helper")
    found = attach_job(job[1].pid, 0.8)
    assert (found.elsewhere, found.diagnosis.rank) == ((2,), 2)
    assert "ranks have not come to the rendezvous: rank 0-1 wait" in found.diagnosis.claim
    environment = processes.environment(job[0].pid)
    if hasattr(torch.distributed.TCPStore, "list_keys"):
        assert ranks_in_store("127.0.0.1", environment["MASTER_PORT"]) == {1}


def test_process_without_ranks_is_no_job() -> None:
    with pytest.raises(ProcessNotFoundError, match="is no rank and has none; expected a process with RANK"):
        attach_job(os.getpid())
    assert ranks_in_store("127.0.0.1", "1") == frozenset()


WATCHED = """
    import os, sys, time, torch, filelock
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 3:
            lock = filelock.FileLock(sys.argv[1])
            lock.acquire(timeout=float(sys.argv[2]), blocking=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.full
@pytest.mark.parametrize("computes", [False, True], ids=["idle", "computes"])
def test_watchdog_names_the_wait(computes: bool, start: Start, tmp_path: Path) -> None:
    """A lock whose holder does not compute is a finding with its path; one that computes is none."""
    lock, script = tmp_path / "data.lock", tmp_path / "train.py"
    script.write_text(textwrap.dedent(WATCHED))
    loop = "while True: pass" if computes else "sys.stdin.readline()"
    code = "import sys, filelock; l = filelock.FileLock(sys.argv[1]); l.acquire(); print('held', flush=True)"
    holder = start(f"{code}\n{loop}", lock)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    out = tmp_path / "run"
    options = ["--monitors", "stalls", "--stall", "1", "--out", str(out)]
    command = [sys.executable, "-m", "backlight", "run", *options, str(script), str(lock), "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Timeout" in done.stderr
    found = [f for f in open_run(out).stored_findings() if f.subject.verdict == "BLOCKED"]
    assert [str(lock) in f.title + f.detail for f in found] == ([] if computes else [True])


@pytest.mark.parametrize(
    ("call", "function"),
    [
        ("lib.pthread_mutex_lock(mutex); lib.pthread_mutex_lock(mutex)", "lock"),
        ("collections.deque(itertools.repeat(0), maxlen=0)", ""),
    ],
    ids=["waits", "computes"],
)
def test_function_in_c_that_holds_the_interpreter_lock(call: str, function: str, start: Start) -> None:
    """No Python thread can run: the stacks are taken from outside."""
    process = start(f"""
        import collections, ctypes, itertools
        lib, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        def hold():
            {call}
        hold()
    """)
    wait_until_in(process, "hold")
    attached = attach(process.pid, 0.8)
    found = attached.diagnosis
    match = re.search(
        r"in C code that holds the interpreter lock \((\w*)\) at <string>:5 in hold", found.claim
    )
    if STARVED in found.claim or any("native stacks" in reason for reason in attached.unseen):
        pytest.skip("the machine is too busy: the process hardly ran, or py-spy did not answer in time")
    if not function and match is None:  # the innermost function of the sample may have no symbol
        assert "at <string>:5 in hold in every sample" in found.claim
        assert "not distinguishable from outside" in found.claim
        return
    assert match is not None, found.claim
    assert function in match[1]
