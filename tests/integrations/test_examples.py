"""The framework examples run and print their findings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import backlight
from backlight.findings.evaluate import findings_of
from backlight.launch.subprocess import run_in_own_session
from integrations.torchrun import environment
from processes import run_captured

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
    done = run_captured(
        [sys.executable, str(EXAMPLES / script), "--out", str(tmp_path / "run"), *arguments],
        env=environment(),
        timeout=240,
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


@pytest.mark.full
@pytest.mark.parametrize("trained", ["all", "body"])
def test_tests_of_the_ci_example(tmp_path: Path, trained: str) -> None:
    done = run_captured(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "ci")],
        env={**environment(), "TRAINED": trained},
        cwd=tmp_path,
    )
    expected = {"all": "2 passed", "body": "2 failed"}[trained]
    assert expected in done.stdout, done.stdout
    assert done.stdout.count("`2.weight` and `2.bias` are not in any optimizer") >= 2 * (trained == "body")


@pytest.mark.full
def test_mcp_example(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the MCP SDK: pip install 'backlight[mcp]'")
    for arguments in ((), ("--fixed",)):
        command = [sys.executable, "-m", "backlight", "run", "--out", str(tmp_path / "runs" / "head")]
        subprocess.run(
            [*command, str(EXAMPLES / "new_head.py"), *arguments],
            env=environment(), capture_output=True, check=True, cwd=tmp_path,
        )  # fmt: skip
        done = run_example(tmp_path, str(EXAMPLES / "with_mcp.py"), "runs")
        assert done.returncode == 0, done.stdout
        assert ("are not in any optimizer" in done.stdout) == (not arguments), done.stdout
        shutil.rmtree(tmp_path / "runs")


@pytest.mark.full
def test_notebook_example(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    healthy, faulty, report = [str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert "No findings" in healthy
    assert "are not in any optimizer" in faulty
    assert "<iframe" in report


OWN_CLUSTER = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
"""Environment of an example of Ray: not the cluster of another test, which ends with that test."""


def run_example(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a session of its own, from another directory; both streams in ``stdout``."""
    return run_in_own_session(
        [sys.executable, *arguments],
        limit=580, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, directory=str(tmp_path),
        environment={**environment(), **OWN_CLUSTER},
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("is_faulty", [False, True])
def test_ray_example(tmp_path: Path, is_faulty: bool) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'backlight[ray]'")
    example = EXAMPLES / "with_ray.py"
    fault = ("--plant", "--stall", "6") if is_faulty else ()
    done = run_example(tmp_path, str(example), "--storage", "runs/ray", *fault)
    assert done.returncode == int(is_faulty), done.stdout[-3000:]
    assert ("HangError: " in done.stdout) is is_faulty, done.stdout[-3000:]
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
