"""``backlight check --steps``: probes and watched steps of a script, as a smoke test of training code."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import backlight

pytestmark = pytest.mark.slow

ConsoleScript = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD((model[0] if "head" in sys.argv else model).parameters(), lr=0.1)
x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
for step in range(10**9):
    if "crash" in sys.argv and step == 4:
        raise ValueError("own failure")
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    if "no-step" in sys.argv:
        sys.exit()
    optimizer.step()
"""

EXAMPLE = Path(__file__).parents[2] / "examples" / "ci" / "backlight.yml"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


CHECK = ("check", "--recompute", "--steps", "20")  # the cheapest probe


def test_findings_of_the_steps_fail_the_check(console_script: ConsoleScript, script: Path) -> None:
    done = console_script(script, *CHECK, "--json", "--fail-on", "warning", "-o", "r", "train.py", "head")
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert [finding["rule"] for finding in answer["findings"]] == ["trained_tensors"]
    assert [probe["probe"] for probe in answer["probes"]] == ["recomputation"]
    assert backlight.open_run(script / "r").last_step() == 19


def test_sound_script_passes_and_leaves_nothing(console_script: ConsoleScript, script: Path) -> None:
    done = console_script(script, *CHECK, "--fail-on", "warning,any", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "No findings" in done.stdout
    assert [path.name for path in script.iterdir()] == ["train.py"]


def test_any_without_steps_is_every_probe(console_script: ConsoleScript, script: Path) -> None:
    done = console_script(script, "check", "--recompute", "--fail-on", "any", "train.py")
    assert (done.returncode, done.stderr) == (0, "")


def test_failing_script_keeps_its_exit_code(console_script: ConsoleScript, script: Path) -> None:
    done = console_script(script, *CHECK, "train.py", "crash")
    assert done.returncode == 1
    assert "ValueError: own failure" in done.stderr
    assert "Failed with ValueError" in done.stdout


def test_no_step_is_not_healthy(console_script: ConsoleScript, script: Path) -> None:
    done = console_script(script, *CHECK, "--fail-on", "error", "train.py", "no-step")
    assert done.returncode == 1
    assert "no optimizer step was recorded" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "8", "--fail-on", "typo"), "--fail-on: no such name as 'typo'; there are: any, future"),
        (("--fail-on", "error"), "--fail-on: 'error' names findings.* add --steps"),
        (("--out", "r"), "--out stores the steps that --steps asks for: add --steps"),
    ],
)
def test_refuses(
    console_script: ConsoleScript, script: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = console_script(script, "check", *arguments, "train.py")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert re.search(message, done.stderr)


def test_example_workflow_runs(console_script: ConsoleScript, script: Path) -> None:
    workflow = yaml.safe_load(EXAMPLE.read_text())
    steps = workflow["jobs"]["smoke-test"]["steps"]
    commands = [line for step in steps for line in step.get("run", "").splitlines() if "backlight " in line]
    commands = [line for line in commands if not line.startswith("pip")]
    assert len(commands) == 5
    for line in commands:
        _, *arguments = line.partition(">")[0].split()
        if arguments[0] == "check":
            arguments[1:1] = ["--recompute"]
        done = console_script(script, *arguments)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout or "report" in line


def test_facts_of_a_good_run_are_checked(console_script: ConsoleScript, script: Path) -> None:
    assert console_script(script, "run", "--steps", "40", "--out", "good", "train.py").returncode == 0
    against = ("check", "--recompute", "--against", "good")
    done = console_script(script, *against, "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"All \d+ facts that held in good hold here\.", done.stdout)
    done = console_script(script, *against, "--json", "train.py", "head")
    assert done.returncode == 1, done.stderr
    (held, *_) = json.loads(done.stdout)["contradicted"]
    assert held == "parameters that an optimizer holds: here without 2.weight, 2.bias; there 4 parameters"
    done = console_script(script, *against, "--format", "github", "train.py", "head")
    assert done.returncode == 1, done.stderr
    assert "title=against%3A contradicts the good run%3A parameters that an optimizer holds" in done.stdout


def test_probe_that_a_project_accepts_fails_nothing(console_script: ConsoleScript, script: Path) -> None:
    (script / "pyproject.toml").touch()
    text = SCRIPT.replace("model(x)", "model(x) * 0 + y.new_zeros(32, 3)")
    (script / "train.py").write_text(text)
    done = console_script(script, "check", "--overfit-one-batch", "train.py")
    assert done.returncode == 1, done.stderr
    accept = "findings --accept check overfit --reason"
    assert f'where it is meant to fail: backlight {accept} "..."' in done.stdout
    done = console_script(script, *accept.split(), "a baseline that learns nothing")
    assert (done.returncode, done.stderr) == (0, "")
    assert "accepts that the probe overfit fails" in done.stdout
    done = console_script(script, "check", "--overfit-one-batch", "train.py")
    assert done.returncode == 0, done.stderr
    assert "overfit        failed       accepted (a baseline that learns nothing): the loss" in done.stdout
    done = console_script(script, "findings", "--accept", "check", "overfitt", "--reason", "x")
    assert done.returncode == 2
    assert "no probe 'overfitt'; did you mean 'overfit'?" in done.stderr
