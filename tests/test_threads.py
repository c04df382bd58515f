"""No signal, list of threads, or fork of a script meets a thread of backlight."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.threads import UNBLOCKED, BackgroundThread, executor, own_threads, running_user_code

SOURCE = Path(backlight.__file__).parent


def blocked_in(status: Path) -> set[int]:
    """Return the signals that a thread blocks, from its ``status``."""
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    mask = int(lines["SigBlk"].strip(), 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_thread_blocks_signals_and_its_starter_does_not() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    release, found = threading.Event(), []

    def work() -> None:
        found.append((threading.get_native_id(), threading.get_ident()))
        release.wait()

    thread = BackgroundThread(work, "backlight-test")
    thread.start()
    try:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        while not found:
            pass
        tid, ident = found[0]
        task = Path(f"/proc/self/task/{tid}")
        blocked = blocked_in(task / "status")
        assert blocked >= {signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD}
        assert not blocked & {signal.SIGSEGV, signal.SIGFPE}, "faulthandler reports its faults"
        assert (task / "comm").read_text() == "backlight-test\n"
        assert ident in own_threads()
        assert ident not in {one.ident for one in threading.enumerate()}
        assert thread.is_alive()
    finally:
        release.set()
        thread.join()
    assert not own_threads() & {ident}
    assert not thread.is_alive()


def test_user_code_in_a_thread_finds_it_and_leaves_no_thread() -> None:
    names: list[str] = []

    def work() -> None:
        with running_user_code():
            names.append(threading.current_thread().name)

    before = threading.enumerate()
    thread = BackgroundThread(work, "backlight-test")
    thread.start()
    thread.join()
    assert names == ["backlight-test"]
    assert threading.enumerate() == before
    with running_user_code():  # of the training thread, it does nothing
        assert threading.enumerate() == before


@pytest.mark.slow
def test_thread_is_no_thread_of_a_forked_child() -> None:
    release = threading.Event()
    thread = BackgroundThread(release.wait, "backlight-test")
    thread.start()
    try:
        child = os.fork()
        if not child:
            os._exit(bool(thread.is_alive()) + 2 * (threading.active_count() != 1))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        release.set()
        thread.join()


@pytest.mark.slow
def test_processes_of_a_thread_block_nothing() -> None:
    printed = []
    code = "print(open('/proc/self/status').read().split('SigBlk:')[1].split()[0])"

    def work() -> None:
        for prefix in ((), UNBLOCKED):
            command = [*prefix, sys.executable, "-c", code]
            printed.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    thread = BackgroundThread(work, "backlight-test")
    thread.start()
    thread.join()
    blocked, unblocked = (int(text, 16) for text in printed)
    assert blocked
    assert not unblocked


def test_executor_blocks_signals() -> None:
    with executor(1) as pool:
        assert signal.SIGTERM in pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()


@pytest.mark.slow
def test_watch_adds_no_thread_that_is_listed_or_takes_signals(tmp_path: Path) -> None:
    listed = set(threading.enumerate())
    tasks = set(Path("/proc/self/task").iterdir())
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", quiet=True):
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert set(threading.enumerate()) == listed
        new = set(Path("/proc/self/task").iterdir()) - tasks
        masks = {
            (task / "comm").read_text().strip(): signal.SIGTERM in blocked_in(task / "status") for task in new
        }
    ours = {name: is_blocked for name, is_blocked in masks.items() if name.startswith("backlight")}
    assert ours
    assert all(ours.values()), masks


STARTERS = {"threading.Thread", "threading.Timer", "Thread", "ThreadPoolExecutor", "start_new_thread"}


def starts_threads(tree: ast.AST) -> list[int]:
    """Return the lines that start a thread, or derive from a class that does."""
    found = []
    for node in ast.walk(tree):
        names = (
            [node.func]
            if isinstance(node, ast.Call)
            else node.bases
            if isinstance(node, ast.ClassDef)
            else []
        )
        for name in names:
            text = ast.unparse(name)
            if text in STARTERS or text.rpartition(".")[2] in {"ThreadPoolExecutor", "start_new_thread"}:
                found.append(node.lineno)
    return found


@pytest.mark.slow
def test_one_module_starts_threads() -> None:
    own = {"threads.py"}
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        # A record of that name, of a thread of another process.
        if "class Thread" not in path.read_text() and starts_threads(ast.parse(path.read_text()))
    }
    assert found == own


@pytest.mark.parametrize(
    "code",
    [
        "threading.Thread(target=f)",
        "class A(threading.Thread): pass",
        "futures.ThreadPoolExecutor(2)",
        "Thread()",
    ],
)
def test_the_rule_about_threads_finds_each(code: str) -> None:
    assert starts_threads(ast.parse(code)) == [1]
