"""The framework examples run and print their findings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import backlight
from backlight.findings.evaluate import findings_of
from backlight.launch.subprocess import run_in_own_session
from integrations.torchrun import environment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "arguments", "steps"),
    [
        ("with_lightning.py", ("--epochs", "1"), 16),
        ("with_huggingface.py", ("--steps", "6"), 6),
        ("with_accelerate.py", ("--epochs", "1"), 8),
    ],
)
def test_example(tmp_path: Path, script: str, arguments: tuple[str, ...], steps: int) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--out", str(tmp_path / "run"), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("next: backlight report") == 1
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert run.last_step() + 1 == steps
    assert ("`sign.weight` and `sign.bias` never received a gradient" in done.stderr) == (
        "lightning" in script
    )


def run_example(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a session of its own, from another directory; both streams in ``stdout``."""
    return run_in_own_session(
        [sys.executable, *arguments],
        limit=580, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, directory=str(tmp_path),
        environment={**environment(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("is_faulty", [False, True])
def test_ray_example(tmp_path: Path, is_faulty: bool) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'backlight[ray]'")
    example = EXAMPLES / "with_ray.py"
    fault = ("--plant", "--stall", "6") if is_faulty else ()
    done = run_example(tmp_path, str(example), "--storage", "runs/ray", *fault)
    assert done.returncode == int(is_faulty), done.stdout[-3000:]
    run = backlight.open_run(tmp_path / "runs" / "ray" / "first" / "backlight")
    assert [rank.rank for rank in run.ranks()] == [0, 1]
    lines = example.read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if "# the accident" in text)
    if is_faulty:
        error = done.stdout[done.stdout.rindex("HangError: ") :]
        assert f"with_ray.py:{line} in train" in error
    else:
        assert "recorded in runs/ray/first/backlight" in done.stdout
        assert (run.status.value, run.last_step()) == ("finished", 49)
        assert findings_of(run) == []


@pytest.mark.full
@pytest.mark.parametrize("fault", [(), ("--detach",)])
def test_deepspeed_example(tmp_path: Path, fault: tuple[str, ...]) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install deepspeed")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = str(EXAMPLES / "with_deepspeed.py")
    done = run_example(tmp_path, *launcher, script, "--out", str(tmp_path / "run"), *fault)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("next: backlight report") == 1
    run = backlight.open_run(tmp_path / "run")
    assert (run.status.value, run.last_step()) == ("finished", 39)
    found = [
        (finding.rule, (finding.subject.parameter or "").partition(".")[0]) for finding in findings_of(run)
    ]
    assert found == ([("no_gradient", "body")] if fault else [])
