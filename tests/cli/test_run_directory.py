"""The run directory of ``backlight run``, by the console script: new, refused, resumed, removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import backlight
from backlight.records import RunStatus

pytestmark = pytest.mark.slow

Console = Callable[..., subprocess.CompletedProcess[str]]

TRAIN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()
print("begun")
model = torch.nn.Linear(3, arguments.width)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(arguments.steps):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
print("trained", arguments.width)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def run_of_train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(TRAIN)
    command = [Path(sys.executable).with_name("backlight"), "run", "-o", "run", "train.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "run"


@pytest.fixture
def recorded(folder: Path, run_of_train: Path) -> Path:
    """Return a directory in which ``runs/x`` holds a run of ``train.py``."""
    shutil.copytree(run_of_train, folder / "runs" / "x")
    return folder


def test_a_run_is_refused_without_resume_before_the_script_begins(
    recorded: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (recorded / "other.py").write_text(TRAIN)
    before = content(recorded)
    monkeypatch.chdir(recorded)
    same = command("run", "-o", "runs/x", "train.py")
    other = command("run", "-o", "runs/x", "--resume", "other.py")
    assert same[2] == (
        "backlight: runs/x: holds a run of train.py already (finished); choose another --out, or continue "
        "this run with --resume (resume=True)\n"
    )
    assert other[2] == (
        "backlight: runs/x: holds another training run (of train.py, this script is other.py); choose "
        "another --out\n"
    )
    for refused in (same, other):
        assert refused[:2] == (2, "")
    assert content(recorded) == before


def test_resume_adds_an_attempt(recorded: Path, console_script: Console) -> None:
    done = console_script(recorded, "run", "-o", "runs/x", "--resume", "train.py", "--steps", "2")
    assert (done.returncode, done.stdout) == (0, "begun\ntrained 2\n")
    run = backlight.open_run(recorded / "runs" / "x")
    assert [(a.step_offset, a.status) for a in run.attempts] == [
        (0, RunStatus.FINISHED), (4, RunStatus.FINISHED)
    ]  # fmt: skip
    assert list(run.series_steps("gradient")) == list(range(6))


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.full)])
def test_another_model_is_not_written_into_the_run(
    steps: int, recorded: Path, console_script: Console
) -> None:
    before = content(recorded)
    arguments = ["train.py", "--width", "3", "--steps", steps]
    done = console_script(recorded, "run", "-o", "runs/x", "--resume", *arguments)
    assert (done.returncode, done.stdout) == (0, "begun\ntrained 3\n")
    assert content(recorded) == before
    message = (
        "RuntimeWarning: backlight: runs/x: holds another training run (8 parameters, this script has 12); "
        "choose another --out. This training is not watched. Your training continues unchanged.\n"
    )
    assert done.stderr.count(message) == 1
    assert "backlight report" not in done.stderr


@pytest.mark.parametrize(
    ("text", "arguments", "code", "reason"),
    [
        pytest.param("", ["--stepz", "3"], 2, "the script ended with exit code 2", id="wrong arguments"),
        pytest.param(
            "import torch\nraise OSError('no data')", [], 1, "the script ended with OSError at train.py:2",
            id="crash early",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "import torch\ntorch.ones(1, requires_grad=True).sum().backward()", [], 0, "1 backward pass was",
            id="no optimizer",
        ),
    ],
)  # fmt: skip
def test_a_script_that_never_trains_leaves_no_run(
    text: str, arguments: list[str], code: int, reason: str, folder: Path, console_script: Console
) -> None:
    if text:
        (folder / "train.py").write_text(text)
    done = console_script(folder, "run", "train.py", *arguments)
    assert done.returncode == code
    assert f"backlight: nothing was measured: {reason}" in done.stderr
    assert "; removed runs/train-" in done.stderr
    assert "backlight report" not in done.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_a_resumed_script_that_never_trains_leaves_the_run_as_it_was(
    recorded: Path, console_script: Console
) -> None:
    before = content(recorded)
    assert console_script(recorded, "run", "-o", "runs/x", "--resume", "train.py", "--typo").returncode == 2
    assert content(recorded) == before


@pytest.mark.parametrize("name", ["profile", pytest.param("memory", marks=pytest.mark.full)])
def test_a_diagnosis_that_fails_leaves_no_run(name: str, folder: Path, console_script: Console) -> None:
    done = console_script(folder, name, "-o", "runs/x", "train.py", "--typo")
    assert done.returncode == 2
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_scripts_that_start_at_once_get_a_directory_each(folder: Path) -> None:
    starts = [
        subprocess.Popen(
            [Path(sys.executable).with_name("backlight"), "run", "--monitors", "health", "train.py"],
            cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in starts:
        output, errors = process.communicate(timeout=250)
        assert (process.returncode, output) == (0, "begun\ntrained 2\n"), errors
    runs = [backlight.open_run(path) for path in (folder / "runs").iterdir()]
    assert len(runs) == 3
    assert all(run.status is RunStatus.FINISHED and run.last_step() == 3 for run in runs)
    assert all(len(run.attempts) == 1 for run in runs)


def test_torchrun_with_one_rank_restarts_into_its_run(folder: Path) -> None:
    (folder / "train.py").write_text(
        TRAIN + "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise SystemExit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone",
         "--max-restarts", "1", "-m", "backlight", "run", "-o", "run", "train.py"],
        cwd=folder, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = backlight.open_run(folder / "run")
    assert [a.status for a in run.attempts] == [RunStatus.FAILED, RunStatus.FINISHED]
