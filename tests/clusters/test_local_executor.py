"""A real job: the local executor of submitit and torchrun with two ranks on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import backlight
from backlight.cli.app import main
from backlight.launch.slurm import Job, submit
from backlight.records import RunStatus

pytest.importorskip("submitit")
TRAINING = Path(__file__).parent / "training.py"


def test_one_command_writes_one_run_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    line = ["run", "--slurm", "cluster=local", "--slurm", "nproc_per_node=2", "--monitors", "health"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as leaving:
        main([*line, "--every", "1", "--out", str(run), str(TRAINING), "4"])
    done, errors = capsys.readouterr()
    assert leaving.value.code in {0, None}, errors
    assert f"run {run}, output in {run}.slurm" in done
    found = backlight.open_run(run)
    assert (found.status, found.losses) == (RunStatus.FINISHED, ())
    assert (found.attempts[0].ranks, found.attempts[0].world_size) == ((0, 1), 2)
    assert found.run_id.startswith("local-")
    assert found.frame("gradient", "norm").steps.tolist() == [0, 1, 2, 3]


@pytest.mark.full
def test_failed_training_fails_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)\n")
    line = [sys.executable, "-m", "backlight", "run", "--slurm", "cluster=local", "--out", "run", "train.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "failed: torchrun ended with exit code 1; its output is in" in done.stderr


@pytest.mark.full
def test_requeued_job_is_a_new_attempt(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    out = tmp_path / "run"
    command = ("-m", "backlight", "run", "--monitors", "health", "--every", "1", "--out", str(out))
    words = (str(TRAINING), "3", "hang", str(mark))
    handle = submit(Job("x", (*command, *words), out, per_node=2, minutes=10, local=True))
    deadline = time.monotonic() + 100
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    controller = int(handle.job_id)
    children = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGUSR2)  # as Slurm does before the time limit
    assert handle.exception() is None
    run = backlight.open_run(tmp_path / "run")
    assert [a.status for a in run.attempts] == [RunStatus.KILLED, RunStatus.FINISHED]
    assert [a.step_offset for a in run.attempts] == [0, 3]
    assert [a.ranks for a in run.attempts] == [(0, 1), (0, 1)]
    assert run.frame("gradient", "norm").steps.tolist() == list(range(6))
