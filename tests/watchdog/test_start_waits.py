"""Waits before the first backward are named where nothing works; a slow start is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from backlight import clock, processes
from backlight.records import Phase
from backlight.store.read.run import open_run
from backlight.threads import BackgroundThread
from backlight.watchdog import start_waits
from backlight.watchdog.shared_state import StateSnapshot
from backlight.watchdog.start_waits import StartWait
from backlight.watchdog.timeouts import is_preparing
from backlight.watchdog.waits import WaitCause, WaitName
from observed_processes import wait_until
from recorded_observations import LIMITS, snapshot

LOCKED = WaitCause(WaitName.INHERITED_LOCK, pids=(7,))


def starting(**changes: Any) -> StateSnapshot:
    """Return the state of a rank that has not trained yet."""
    return snapshot(**{"backwards": 0, "forwards": 0, "phase": Phase.DATA, **changes})


class Work:
    """What the processes of a rank have done so far, and the time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.cpu_s, self.bytes = 100.0, 0.0, 0
        patch.setattr(clock, "monotonic", lambda: self.now)
        patch.setattr(start_waits, "cpu_s", lambda *_: self.cpu_s)
        patch.setattr(start_waits, "_moved_by_script", lambda pid: self.bytes)
        patch.setattr(start_waits, "descendants", lambda pid, _: {pid})

    def passes(self, seconds: float, *, cores: float = 0.0, rate: int = 0) -> None:
        self.now += seconds
        self.cpu_s += cores * seconds
        self.bytes += int(rate * seconds)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def waited(work: Work, *, cores: float = 0.0, rate: int = 0, periods: int = 8, **state: object) -> StartWait:
    wait = StartWait(LIMITS)
    for _ in range(periods):
        wait.update(starting(**state))
        work.passes(start_waits.PERIOD_S, cores=cores, rate=rate)
    return wait


def test_processes_without_work_are_due(work: Work) -> None:
    assert waited(work).is_due


@pytest.mark.parametrize(
    "circumstances",
    [
        {"cores": 0.1},  # it compiles, or prepares its data
        {"rate": 100_000},  # a slow download
        {"periods": 2},
        {"backwards": 1},
        {"phase": Phase.EVALUATION},
        {"phase": Phase.CHECKPOINT},
        {"inside": True},
    ],
    ids=str,
)
def test_slow_start_is_not_due(work: Work, circumstances: dict[str, float]) -> None:
    assert not waited(work, **circumstances).is_due  # type: ignore[arg-type]


def test_work_in_between_starts_the_time_anew(work: Work) -> None:
    wait = waited(work)
    work.passes(10, cores=1.0)
    wait.update(starting())
    assert not wait.is_due


def test_wait_is_confirmed_by_a_second_one(work: Work) -> None:
    wait = waited(work)
    assert not wait.confirms(LOCKED, starting())
    assert not wait.is_due
    work.passes(10)
    assert wait.is_due
    assert wait.confirms(LOCKED, starting())


@pytest.mark.parametrize(
    "cause",
    [
        None,
        WaitCause(WaitName.BREAKPOINT),
        WaitCause(WaitName.INPUT),
        WaitCause(WaitName.RENDEZVOUS),
        WaitCause(WaitName.STORAGE),
        WaitCause(WaitName.COMPILE_WORKERS, pids=(7,)),
        WaitCause(WaitName.FILE_LOCK, progresses=True, pids=(7,)),
    ],
)
def test_other_waits_are_not_reported(work: Work, cause: WaitCause | None) -> None:
    wait = waited(work)
    for _ in range(3):
        assert not wait.confirms(cause, starting())
        work.passes(200)


def test_two_different_waits_are_not_confirmed(work: Work) -> None:
    wait = waited(work)
    assert not wait.confirms(LOCKED, starting())
    assert not wait.confirms(WaitCause(WaitName.INHERITED_LOCK, pids=(8,)), starting())


def test_bytes_of_this_process_are_read(tmp_path: Path) -> None:
    def write() -> None:
        (tmp_path / "file").write_bytes(bytes(1 << 20))
        done.set()
        end.wait()

    end, done, before = threading.Event(), threading.Event(), start_waits._moved_by_script(os.getpid())
    own = BackgroundThread(write, "backlight-test")
    own.start()
    done.wait()
    assert 0 <= start_waits._moved_by_script(os.getpid()) - before < 1 << 20
    done.clear()
    script = threading.Thread(target=write)
    script.start()
    done.wait()
    assert start_waits._moved_by_script(os.getpid()) - before >= 1 << 20
    end.set()
    assert start_waits._moved_by_script(1 << 30) == 0


def test_rank_prepares_until_its_first_backward() -> None:
    assert is_preparing(starting())
    assert not is_preparing(starting(phase=Phase.BACKWARD))


SCRIPT = """
    import sys, threading, time
    import torch
    from torch.utils.data import DataLoader, Dataset
    lock = threading.Lock()
    class Data(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, i):
            if sys.argv[1] == "lock":
                with lock:
                    pass
            else:
                time.sleep(3)
            return torch.randn(4)
    if __name__ == "__main__":
        lock.acquire()
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DataLoader(Data(), batch_size=1, num_workers=1, multiprocessing_context="fork"):
            model(x).sum().backward()
            optimizer.step()
            print("stepped", flush=True)
            break
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["lock", "sleep"])
def test_lock_that_a_worker_has_inherited(kind: str, tmp_path: Path) -> None:
    script, out, config = tmp_path / "train.py", tmp_path / "run", tmp_path / "limits.toml"
    script.write_text(textwrap.dedent(SCRIPT))
    config.write_text("[thresholds.stalls]\nfloor_start = 8.0\n")
    command = [sys.executable, "-m", "backlight", "run", "--config", config, "--out", out, script, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            if kind == "sleep":  # the control: no lock, and its batch comes
                output, _ = process.communicate(timeout=300)
                assert output == "stepped\n"
                assert not [f for f in open_run(out).stored_findings() if f.rule == "stall"]
                return
            wait_until((out / "manifest.json").exists, "the run begins")
            wait_until(lambda: bool(open_run(out).stored_findings()), "it is reported")
            (stall,) = open_run(out).stored_findings()
            assert stall.subject.verdict == "BLOCKED"
            claim = "which waits for a lock at train.py:11 in Data.__getitem__"
            assert claim in f"{stall.title} {stall.detail}"
            assert "held when the worker was forked" in stall.fix
            assert "multiprocessing_context='spawn'" in stall.fix
        finally:
            for child in processes.children(process.pid):
                processes.send_signal(child, signal.SIGKILL)
            process.kill()
