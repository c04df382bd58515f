"""``backlight run --stop-on`` by the installed console script: the script may save; exit code 79."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import backlight
from backlight.records import RunStatus

TRAIN = """
import signal, sys
import torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(is_over=lambda: False):
    step = 0
    while not is_over():
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).sum() * (float("nan") if step == 3 else 1.0)).backward()
        optimizer.step()
        step += 1
def save():
    torch.save(model.state_dict(), "checkpoint.pt")
    print("saved")
"""

SCRIPTS = {
    "interrupt": "try:\n    train()\nexcept KeyboardInterrupt:\n    save()\n",
    "handler": (
        "def handle(*given):\n    save()\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, handle)\ntrain()\n"
    ),
    "flag": (
        "over = []\nsignal.signal(signal.SIGTERM, lambda *given: over.append(1))\n"
        "train(lambda: bool(over))\nsave()\n"
    ),
    "ignored": (
        "signal.signal(signal.SIGTERM, lambda *given: print('ignored'))\n"
        "try:\n    train()\nfinally:\n    save()\n"
    ),
    "error": (
        "class Preempted(Exception):\n    pass\n"
        "def handle(*given):\n    raise Preempted('of the handler')\n"
        "signal.signal(signal.SIGTERM, handle)\ntry:\n    train()\nexcept Preempted:\n    save()\n    raise\n"
    ),
    "background": (  # a job in the background of a shell ignores SIGINT
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\ntry:\n    train()\nexcept SystemExit as end:\n"
        "    save()\n    print(end.code, end.finding.rule, end.finding.severity)\n    raise\n"
    ),
}
PRINTED = {"ignored": "ignored\nsaved\n", "background": "saved\n79 non_finite error\n"}


def run_stopped(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("backlight"), "run", "-o", "run", *options, "train.py"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in {"interrupt", "flag"} else pytest.param(n, marks=pytest.mark.full) for n in SCRIPTS]
)
def test_the_script_saves_before_it_is_ended(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + SCRIPTS[name])
    done = run_stopped(tmp_path, "--every", "1", "--stop-on", "spike,non_finite")
    assert (done.returncode, done.stdout) == (79, PRINTED.get(name, "saved\n")), done.stderr
    assert (tmp_path / "checkpoint.pt").exists()
    lines = done.stderr.splitlines()
    assert lines[1].endswith(" (non_finite)")
    assert lines[2].startswith("backlight: stopping after ")
    assert ("Preempted: of the handler" in done.stderr) == (name == "error")
    assert ("Traceback" in done.stderr) == (name == "error")
    run = backlight.open_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    (event,) = run.events("stopped")
    assert event.payload["rule"] == "non_finite"
    # Steps are whole: the last one that is recorded had its optimizer step.
    (stopped,) = [int(line.split()[3].replace(",", "")) for line in lines if "stopping after" in line]
    more = {"flag": 1, "ignored": 10}.get(name, 0)
    assert run.last_step() + 1 == stopped + more


def test_a_run_without_the_finding_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "train(iter([0, 0, 1]).__next__)\nsys.exit(3)\n")
    assert run_stopped(tmp_path, "--stop-on", "error").returncode == 3
