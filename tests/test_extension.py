"""The example extension, installed and used through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "extension"

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(30):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and install the package into a separate directory, offline."""
    folder = tmp_path_factory.mktemp("extension")
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    target = folder / "target"
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--target", target, folder / "source"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "train.py").write_text(SCRIPT)
    return folder


def environment(installed: Path) -> dict[str, str]:
    path = os.pathsep.join([str(installed / "target"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def call(installed: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "backlight", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, cwd=installed, env=environment(installed),
    )  # fmt: skip


def backlight(installed: Path, *arguments: object) -> str:
    done = call(installed, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(installed: Path, name: str, rate: float) -> Path:
    out = installed / name
    options = ("--every", 1, "--tracker", "lines", "--monitors", "health,oscillation", "--out", out)
    backlight(installed, "run", *options, "train.py", rate)
    return out


@pytest.mark.full
def test_extension_finds_the_fault_and_not_the_control(installed: Path) -> None:
    faulty, control = run(installed, "faulty", 0.55), run(installed, "control", 0.01)
    (finding,) = json.loads(backlight(installed, "findings", faulty, "--json"))["findings"]
    assert finding["rule"] == "oscillating"
    assert finding["evidence"][0]["value"] > 0.9
    assert json.loads(backlight(installed, "findings", control, "--json"))["findings"] == []
    lines = [json.loads(line) for line in (faulty / "export" / "lines.jsonl").read_text().splitlines()]
    assert lines[29]["oscillation/flipped"] > 0.9
    assert lines[-1]["finding"] == "oscillating"
    backlight(installed, "report", faulty, "--out", installed / "faulty.html")
    assert "Gradients that change their sign" in (installed / "faulty.html").read_text()


@pytest.mark.full
def test_a_setting_of_the_extension_is_one_line(installed: Path) -> None:
    """It is declared in one place, and given on the command line, in a file and in Python alike."""
    common = ("--every", 1, "--monitors", "health,oscillation")
    (installed / "settings.toml").write_text("[oscillation]\nsmallest = 1e9\n")
    (installed / "watched.py").write_text(
        "import sys, backlight\n"
        "watch = backlight.watch(run=sys.argv[2], every=1, monitors='health,oscillation',"
        " oscillation={'smallest': 1e9}).start()\n" + SCRIPT + "watch.stop()\n"
    )
    options = ("--set", "oscillation.smallest=1e9")
    backlight(installed, "run", *common, *options, "--out", "by-option", "train.py", 0.55)
    backlight(installed, "run", *common, "--config", "settings.toml", "--out", "by-file", "train.py", 0.55)
    python = [sys.executable, "watched.py", "0.55", "by-keyword"]
    subprocess.run(python, cwd=installed, env=environment(installed), check=True, capture_output=True)
    for name in ("by-option", "by-file", "by-keyword"):
        assert json.loads(backlight(installed, "findings", name, "--json"))["findings"] == []
    done = call(installed, "run", *common, "--set", "oscillation.smalest=1", "train.py", 0.55)
    assert done.returncode == 2
    assert "oscillation: unknown key 'smalest'; did you mean 'smallest'?" in done.stderr
    done = call(installed, "run", *common, "--set", "oscillation.smallest=-1", "train.py", 0.55)
    assert "--set oscillation.smallest: -1: expected 0 or more" in done.stderr


@pytest.mark.full
def test_doctor_lists_the_extension_and_its_version(installed: Path) -> None:
    checks = {check["what"]: check for check in json.loads(backlight(installed, "doctor", "--json"))}
    for what in (
        "monitor oscillation",
        "rule oscillating",
        "panel oscillation",
        "experiment teacher",
        "tracker lines",
    ):
        assert checks[what]["found"] == "backlight-oscillation 0.1.0"
        assert checks[what]["state"] == "ok"


@pytest.mark.full
def test_extension_experiment_runs(installed: Path) -> None:
    assert "\nteacher" in backlight(installed, "grok", "list")
    backlight(installed, "grok", "run", "teacher", "--out", installed / "grok")
    backlight(installed, "export", installed / "grok", installed / "grok.csv")
    assert "train_loss" in (installed / "grok.scalars.csv").read_text()
