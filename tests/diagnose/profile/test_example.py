"""The example with a slow loader and a needless cast: both findings are stored in the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from answer_schemas import schema_of
from jsonschema import validate

import backlight
from backlight.cli import app as application

pytestmark = pytest.mark.alone  # the findings depend on shares of time

EXAMPLE = Path(__file__).parents[3] / "examples" / "slow_step.py"
CAST = 1 + next(i for i, line in enumerate(EXAMPLE.read_text().splitlines()) if "# the cast" in line)


def run_backlight(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "backlight", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


Profile = tuple[Path, dict[str, Any], str]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    for _ in range(5):
        folder = tmp_path_factory.mktemp("example")
        done = run_backlight(
            folder,
            "profile",
            "--json",
            "--timed",
            "80",
            "--traced",
            "10",
            "--out",
            "run",
            str(EXAMPLE),
            "--decoding",
            "0.3",
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        if not answer["not_measured"]:  # such as step times that drift on a busy machine
            break
    return folder, answer, done.stderr


def test_both_faults_are_found(profile: Profile) -> None:
    found = [finding for finding in profile[1]["findings"] if finding["rule"] == "bottleneck"]
    assert any("phase/data" in finding["evidence"][0]["path"] for finding in found)
    assert any(f"slow_step.py:{CAST} (forward)" in (finding["subject"]["line"] or "") for finding in found)
    for output_of_the_profiler in ("USDT", "profiler_start"):
        assert output_of_the_profiler not in profile[2]


def test_run_contains_every_timed_step(profile: Profile) -> None:
    folder, answer, _ = profile
    run = backlight.open_run(folder / "run")
    forward = run.scalar("phase/forward")
    assert forward.unit == "s"
    assert len(forward.steps) >= 80
    assert list(forward.steps) == list(range(len(forward.steps)))
    total = sum(run.scalar(name).values for name in run.scalar_names("backlight") if name != "phase/clip")
    steady = sorted(total[answer["warmup_dropped"] :])
    assert steady[len(steady) // 2] * 1e3 == pytest.approx(answer["step"]["median_ms"], rel=0.05)
    paths = run.evidence()
    (path,) = [p for p in paths if p.endswith("profile.json")]
    assert answer["trace"] in paths
    stored = json.loads(run.read_evidence(path))
    assert stored["phases"] == answer["phases"]
    assert run.fingerprint().parameter_count == answer["parameters"] == 17 * 65536 + 65537
    assert not list(folder.glob("*.gz"))


def test_report_shows_the_profile(profile: Profile) -> None:
    run = profile[0] / "run"
    with pytest.raises(SystemExit) as leaving:
        application.main(["report", str(run)])
    assert leaving.value.code == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    for title in (
        "Time per step",
        "Time by line",
        "Time by module",
        "Operators of a step",
        "Kind of operation",
        "Copies (aten::copy_)",
    ):
        assert title in page
    assert f"slow_step.py:{CAST} (forward)" in page


RANKS = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(500):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.full
def test_ranks_end_together_and_rank_0_is_traced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "backlight"]
    command += ["profile", "--timed", "15", "--out", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] step " in done.stdout
    run = backlight.open_run(tmp_path / "run")
    for rank in (0, 1):
        assert len(run.scalar("phase/backward", rank=rank).steps) == 15
    assert len([p for p in run.evidence() if p.endswith("trace.json.gz")]) == 1


COMPILED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fast = torch.compile(model)
for _ in range(300):
    fast(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
counters = torch._dynamo.utils.counters["frames"]
"""


@pytest.mark.full
def test_compiled_code_stays_compiled(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COMPILED, encoding="utf-8")
    done = run_backlight(tmp_path, "profile", "--json", "--timed", "12", "train.py")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    states = {row["name"]: row["state"] for row in answer["optimizations"]}
    assert states["compiled regions"] == "on"
    assert any("CompiledFunction" in row["name"] for row in answer["operators"])
    assert "lines of copies: compiled code would be recompiled for them" in answer["not_measured"]
    assert [module["name"] for module in answer["modules"]] == [""]


ALTERNATING = """
import torch
from torch import nn
first, second = nn.Linear(4, 4), nn.Linear(4, 1)
optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (first, second)]
for _ in range(200):
    for optimizer in optimizers:
        second(first(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.full
def test_alternating_optimizers_are_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALTERNATING, encoding="utf-8")
    answer = json.loads(run_backlight(tmp_path, "profile", "--json", "--timed", "12", "train.py").stdout)
    validate(answer, schema_of("profile"))
    assert any("they step alternately" in text for text in answer["not_measured"])
    assert {module["name"] for module in answer["modules"]} == {"first", "second"}
