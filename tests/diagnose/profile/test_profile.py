"""A profiled script: injected sleeps by phase and module, sum of phases, trace."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backlight.cli import app as application

SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((8,), float(index % 7))

class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.006)
        return grad

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        time.sleep(0.005)
        return self.layer(x)

class PausesInBackward(nn.Module):
    def forward(self, x):
        return Pause.apply(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.slow = Slow()
        self.pause = PausesInBackward()
        self.again = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    def forward(self, x):
        return checkpoint(self.again, self.pause(self.slow(x)), use_reentrant=False)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step = 0
for batch in DataLoader(Data(), batch_size=4):
    loss = model(batch).square().mean()
    time.sleep(0.003)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step == LAST:
        break
print("steps of the script:", step)
"""


Answer = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "train.py").write_text(SCRIPT.replace("LAST", "1000"), encoding="utf-8")
    command = [sys.executable, "-m", "backlight", "profile", "--json", "--timed", "16", "--traced", "3"]
    command += ["--tokens-per-step", "32", "--peak-flops", "1e9", "--trace-file", "trace.json.gz"]
    command += ["train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return folder, json.loads(done.stdout)


def test_injected_sleeps_are_in_their_phases(answer: Answer) -> None:
    phases = answer[1]["phases"]
    assert list(phases) == ["data", "forward", "loss", "backward", "optimizer", "other"]
    for name, least_ms in {"data": 4, "forward": 5, "loss": 3, "backward": 6}.items():
        assert phases[name]["median_ms"] >= least_ms


def test_phases_add_up_to_the_step(answer: Answer) -> None:
    found = answer[1]
    assert found["sum_error"] < 0.02
    assert sum(phase["share"] for phase in found["phases"].values()) == pytest.approx(1)
    assert found["step"]["median_ms"] >= 18
    assert found["step"]["low_ms"] <= found["step"]["median_ms"] <= found["step"]["high_ms"]


def test_injected_sleeps_are_in_their_modules(answer: Answer) -> None:
    modules = {module["name"]: module for module in answer[1]["modules"]}
    assert modules["slow"]["forward_exclusive_ms"] >= 5
    assert modules["slow.layer"]["forward_ms"] < 5
    assert modules["pause"]["backward_exclusive_ms"] >= 6
    assert modules[""]["backward_ms"] >= modules["pause"]["backward_ms"]
    assert modules[""]["backward_exclusive_ms"] < 6
    assert modules["again"]["recomputed_ms"] > 0
    assert modules["slow"]["recomputed_ms"] == 0
    assert modules["again.0"]["backward_ms"] > 0


def test_trace_contains_phases_and_steps(answer: Answer) -> None:
    folder, found = answer
    with gzip.open(folder / found["trace"], "rt", encoding="utf-8") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    # Three steps for the times, and one more with lines.
    assert names.count("backlight:backward") == 4
    assert names.count("backlight.module/slow.layer") == 4
    assert sum(name.startswith("ProfilerStep#") for name in names) == 4
    assert found["traced_steps"] == 3


def test_no_file_is_left_unasked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("LAST", "1000"), encoding="utf-8")
    command = [sys.executable, "-m", "backlight", "profile", "--timed", "3", "--traced", "1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_throughput_states_its_basis(answer: Answer) -> None:
    found = answer[1]
    rate = 32 / (found["step"]["median_ms"] / 1e3)
    assert found["parameters"] == 2 * (8 * 8 + 8)
    assert found["tokens_per_second"] == pytest.approx(rate)
    assert found["mfu"] == pytest.approx(rate * 6 * 144 / 1e9)
    assert "N = 144" in found["mfu_basis"]


def test_short_idle_and_refused_profiles_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace("LAST", "5"), encoding="utf-8")
    (tmp_path / "idle.py").write_text("print('idle')\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("text", encoding="utf-8")
    codes, printed = [], []
    for arguments in (["train.py"], ["idle.py"], ["--out", "run", "train.py"]):
        with pytest.raises(SystemExit) as leaving:
            application.main(["profile", *arguments])
        codes.append(leaving.value.code)
        printed.append(capsys.readouterr())
    early, idle, refused = printed
    assert codes == [0, 2, 2]
    assert "step not measured: 5 steps are too few to find a steady part" in early.out
    assert "steps of the script: 5" in early.out
    assert not list(tmp_path.glob("*.gz"))
    assert "idle.py: ended (exit code 0) without a step of an optimizer" in idle.err
    assert "steps of the script" not in refused.out  # refused before the script starts
    assert refused.err.startswith("backlight: run")
