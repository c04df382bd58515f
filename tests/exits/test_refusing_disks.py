"""A disk that refuses the run costs no training: it goes on unwatched, with one line."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight import atomic_files
from backlight.store.errors import RunPathError
from backlight.store.format.manifest import Manifest
from backlight.store.write import attempt, database


def train(watch: Any = None) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if watch is not None:
        watch.start()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        if watch is not None:
            watch.log(accuracy=0.5)
    if watch is not None:
        watch.stop()
    return model.weight.detach()


def refuse(error: Exception) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


PLACES = {
    "folder": (Path, "mkdir"),
    "manifest": (Manifest, "write"),
    "document": (atomic_files, "write"),
    "database": (database, "connect"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("is_chosen", [True, False])
def test_refusal_at_the_start_leaves_training_unwatched(
    place: str, number: int, is_chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = train()
    monkeypatch.chdir(tmp_path)
    error: Exception = OSError(number, os.strerror(number))
    if place == "database":
        error = sqlite3.OperationalError(os.strerror(number))
    monkeypatch.setattr(*PLACES[place], refuse(error))
    watch = backlight.watch(run="chosen" if is_chosen else None)
    name = "chosen" if is_chosen else "runs"
    with pytest.warns(
        RuntimeWarning, match=rf"this training is not watched: {name}.*cannot be written"
    ) as warned:
        weight = train(watch)
    assert torch.equal(weight, control)
    assert len(warned) == 1
    assert os.strerror(number) in str(warned[0].message)
    assert "\n" not in str(warned[0].message)
    assert not watch.is_recorded
    monkeypatch.undo()
    assert not any((tmp_path / name).rglob("*")), "nothing is left behind"


def test_path_that_is_no_folder_is_the_error_of_who_chose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()  # a file
    with pytest.raises(RunPathError, match="Not a directory; choose another --out"):
        backlight.watch(run="runs/first").start()
    with pytest.warns(RuntimeWarning, match="this training is not watched: runs/"):
        train(backlight.watch())


def test_script_runs_where_its_run_cannot_be_written(
    tmp_path: Path, console_script: Callable[..., Any]
) -> None:
    (tmp_path / "runs").touch()
    (tmp_path / "train.py").write_text(
        "import sys, torch\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\nprint('trained')\nsys.exit(3)\n"
    )
    done = console_script(tmp_path, "run", "train.py")
    assert (done.returncode, done.stdout) == (3, "trained\n")
    (line,) = done.stderr.splitlines()
    assert "backlight: this training is not watched: runs/train-" in line
    assert "cannot be written: Not a directory" in line


HOLD = """
import fcntl, os, sys, time
for path in sys.argv[2:]:
    descriptor = os.open(path, os.O_RDONLY)
    if sys.argv[1] == "folder":
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    elif sys.argv[1] == "bytes":
        fcntl.lockf(descriptor, fcntl.LOCK_SH)
    else:
        import sqlite3
        kept = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        kept.execute("BEGIN")
        kept.execute("SELECT * FROM sqlite_master").fetchall()
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["folder", "bytes", "sqlite"])
def test_lock_of_a_reader_does_not_stop_a_resumed_training_run(
    kind: str, tmp_path: Path, console_script: Callable[..., Any]
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\nprint('trained')\n"
    )
    assert console_script(tmp_path, "run", "--out", "first", "train.py").returncode == 0
    run = tmp_path / "first"
    files = [run] if kind == "folder" else [run / "attempt-000/rank-00000.db"]
    files += [run / "manifest.json"] if kind == "bytes" else []
    with subprocess.Popen([sys.executable, "-c", HOLD, kind, *files], stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"held\n"
            done = console_script(tmp_path, "run", "--resume", "--out", "first", "train.py")
        finally:
            reader.kill()
    assert (done.returncode, done.stdout) == (0, "trained\n")
    refused = [line for line in done.stderr.splitlines() if "not watched" in line]
    if kind == "folder":
        assert len(refused) == 1
        assert "first: another process is just opening or compacting this run, or locks it" in refused[0]
    else:
        assert refused == []
        assert (run / "attempt-001/rank-00000.db").exists()


def test_rank_does_not_wait_for_a_run_that_no_disk_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "REFUSAL_S", 0.0)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(attempt.RunWriteError, match="run: cannot be written: Permission denied"):
        attempt.enter_further(tmp_path / "run", rank=1, launch="one", timeout_s=3600.0)
