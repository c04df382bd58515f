"""Sweeps as tasks of Ray, which starts on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backlight import clock, processes
from backlight.experiments import sweep
from backlight.launch.ray_tasks import RayError, RayOptions
from backlight.launch.subprocess import run_in_own_session
from integrations.torchrun import environment

HERE = Path(__file__).parent


def ray_environment() -> dict[str, str]:
    return {**environment(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def _ray() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'backlight[ray]'")


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_in_own_session(
        [sys.executable, *command],
        limit=280, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        directory=str(folder), environment=ray_environment(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["cores=2"], "--ray cores: expected one of address, cpus, gpus, memory_gb, retries"),
        (["cpus=many"], "--ray cpus=many: expected a number that is not negative"),
        (["retries=-1"], "--ray retries=-1: expected a number"),
        (["cpus=1", "cpus=2"], "cpus is given twice"),
    ],
)
def test_unusable_option_is_refused(items: list[str], expected: str) -> None:
    with pytest.raises(RayError, match=expected):
        RayOptions.of(items)


@pytest.mark.usefixtures("_ray")
def test_tasks_are_repeated_and_a_failure_leaves_the_others(tmp_path: Path) -> None:
    done = run(str(HERE / "ray_calls.py"), str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    given = json.loads(done.stdout.splitlines()[-1])
    assert given["found"] == {"0": "0", "1": "1", "2": "4", "3": "cannot square 3"}
    assert given["too_large"].startswith("--ray: no node of the cluster has CPU=1, GPU=64")


RECIPE = """
import torch
from torch import nn

def build_model(dim=8):
    return nn.Linear(dim, dim)

def batches(rank=0, world_size=1, dim=8):
    while True:
        yield torch.randn(4, dim)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.full
@pytest.mark.usefixtures("_ray")
def test_sweep_on_ray_gives_what_it_gives_here(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    command = ("-m", "backlight", "sweep", "recipe.py", "--set", "dim=8,16,32", "--fake", "--json")
    here = run(*command, folder=tmp_path)
    there = run(*command, "--ray", "address=local", folder=tmp_path)
    assert there.returncode == 0, there.stderr[-3000:]
    assert json.loads(there.stdout) == json.loads(here.stdout)


@pytest.mark.full
@pytest.mark.usefixtures("_ray")
def test_interrupted_sweep_leaves_no_process(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "backlight",
        "grok",
        "run",
        "nanda",
        "--steps",
        "100000",
        "--seeds",
        "0,1",
    ]
    process = subprocess.Popen(
        [*command, "--out", "sweep", "--ray", "address=local"],
        cwd=tmp_path, env=ray_environment(), start_new_session=True,
    )  # fmt: skip
    deadline = clock.monotonic() + 240
    while not (tmp_path / "sweep" / "seed-0" / "manifest.json").exists():
        assert clock.monotonic() < deadline, "the first run has not begun"
        clock.sleep(0.2)
    assert running_below(tmp_path)
    process.send_signal(signal.SIGINT)
    process.wait(120)
    assert running_below(tmp_path) == []


def running_below(folder: Path) -> list[str]:
    """Return the command lines that name a path below ``folder``."""
    lines = [" ".join(processes.command_line(pid)) for pid in processes.read_process_table()]
    return [line for line in lines if f"{folder}/" in line]


def test_repeated_task_resumes_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[list[str]] = []

    def end(line: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        lines.append(line)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "manifest.json").touch()
        return subprocess.CompletedProcess(line, int(len(lines) == 1))

    monkeypatch.setattr(sweep, "run_in_own_session", end)
    with pytest.raises(RuntimeError, match=r"ended with exit code 1; see .*run.log"):
        sweep._run_task(tmp_path / "run", ("python", "-m", "backlight"), threads=1)
    sweep._run_task(tmp_path / "run", ("python", "-m", "backlight"), threads=1)
    assert [line[1:] for line in lines] == [["-m", "backlight"], ["-m", "backlight", "--resume"]]
