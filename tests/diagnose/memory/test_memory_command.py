"""``backlight memory`` on a script and on a recipe, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from answer_schemas import schema_of
from jsonschema import validate

from backlight.cli import app as application
from backlight.diagnose.memory import measure
from backlight.diagnose.memory.measure import read_allocator
from backlight.diagnose.memory.result import AllocatorStatistics
from backlight.report.panel import PANELS, Drawn, NotMeasured
from backlight.report.source import Source
from backlight.report.verdict import outcome, summary_of
from backlight.store.read.run import open_run
from backlight.text import size
from run_builder import build_run

RECIPE = Path(__file__).parents[3] / "examples" / "gpt_recipe.py"

SCRIPT = """
import sys
import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
average = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(400, 32), torch.randint(10, (400,)))
for number, (x, y) in enumerate(DataLoader(data, batch_size=40)):
    x = x + torch.from_numpy(numpy.ones((40, 32), dtype=numpy.float32))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print("step", number)
print("end", sys.argv[1:])
"""


def test_script_is_measured_and_stored(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    # In a process of its own: every tensor of this one would be held memory.
    command = [sys.executable, "-m", "backlight", "memory", "--json", "--out", "run", "train.py", "--its-own"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    validate(answer, schema_of("memory measure"))
    held = (32 * 64 + 64 + 64 * 10 + 10) * 4
    assert answer["kinds"]["parameters"] == held
    # At the peak backward has come through the last layer. Adam counts steps in four bytes each.
    assert answer["kinds"]["gradients"] == (64 * 10 + 10) * 4
    assert answer["kinds"]["optimizer_state"] == 2 * held + 4 * 4
    # The average of the weights, and the data set.
    assert answer["kinds"]["held"] == held + 400 * 32 * 4 + 400 * 8
    # The batch, its sum with ones, and the ones, which numpy holds.
    assert answer["kinds"]["inputs"] >= 40 * 32 * 4 + 40 * 8
    assert sum(answer["kinds"].values()) == answer["peak"]
    assert set(answer["phases"]) >= {"data", "forward", "loss", "backward", "clip", "optimizer"}
    assert answer["logits"]["shape"] == [40, 10]
    assert answer["logits"]["formula"] == 40 * 10 * (4 + 4)
    assert (answer["device"], answer["allocator"], answer["trouble"]) == ("cpu", None, [])
    assert {m["name"] for m in answer["modules"]} >= {"", "0", "2"}
    assert "step 1" in done.stderr
    assert "step 2" not in done.stderr  # ended after the third update
    source = Source(open_run(tmp_path / "run"))
    said = outcome(source)
    assert (said.tone, said.headline.split(",")[0]) == ("clear", f"Peak memory {size(answer['peak'])}")
    assert said.unmeasured == ()
    assert summary_of(source).figures(source)[0][1] == size(answer["peak"])
    drawn = PANELS["memory_steps"].render(source)
    assert isinstance(drawn, Drawn)
    assert {"parameters", "held", "activations"} <= {
        line["label"] for line in drawn.data["charts"][0]["lines"]
    }
    table = PANELS["memory_modules"].render(source)
    assert isinstance(table, Drawn)
    assert [row[0] for row in table.data["tables"][0]["rows"]].count("2") == 1


def test_recipe_is_predicted_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--set batch=2 --set seq=32 --checkpointing --json --budget 8M --out"
    with pytest.raises(SystemExit) as leaving:
        application.main(["memory", "predict", str(RECIPE), *given.split(), str(tmp_path / "run")])
    assert leaving.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["how"], answer["built"]) == ("predicted", "meta")
    assert answer["logits"]["shape"] == [2 * 32, 256]
    assert [len(saving["wrapped"]) for saving in answer["checkpointing"]] == [1, 2]
    assert answer["context_bytes"][0] < answer["context_bytes"][1]
    assert isinstance(PANELS["memory_steps"].render(Source(open_run(tmp_path / "run"))), Drawn)
    assert answer["fit"]["peak"] <= 8_000_000 < answer["fit"]["peak_above"]


def test_command_reads_recipe_once_without_a_gpu_and_prints_only_json(tmp_path: Path) -> None:
    seen = "import os\nprint('read with', repr(os.environ['CUDA_VISIBLE_DEVICES']))\n"
    head, future, rest = RECIPE.read_text(encoding="utf-8").partition("from __future__ import annotations\n")
    (tmp_path / "recipe.py").write_text(f"{head}{future}{seen}{rest}", encoding="utf-8")
    command = [sys.executable, "-m", "backlight", "memory", "predict", "recipe.py", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    validate(answer, schema_of("memory predict"))
    assert answer["how"] == "predicted"
    assert done.stderr.count("read with ''") == done.stderr.count("read with") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "recipe.py", "--set", "dimm=8"], "'dimm'; did you mean 'dim'?"),
        (["predict", "recipe.py", "--budget", "much"], "expected a size such as 500M"),
        (["predict", "recipe.py", "--budget", "1G", "--batch-setting", "samples"], "'samples'"),
        (["predict", "recipe.py", "stray"], "Got unexpected extra argument (stray)"),
        (["predict", "half.py"], "expected `def batches(rank, world_size, **settings)`"),
        (["recipe.py"], "looks like a recipe: backlight memory predict"),
        (["predict", "missing.py"], "no such recipe"),
    ],
)
def test_refusals_are_one_line(
    tmp_path: Path, arguments: list[str], message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    text = RECIPE.read_text(encoding="utf-8")
    (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
    (tmp_path / "half.py").write_text(text.replace("def batches", "def batch_es"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        application.main(["memory", *arguments])
    errors = capsys.readouterr().err
    assert leaving.value.code == 2
    assert message in errors
    assert errors.count("\n") == 1


def test_script_that_ends_too_early_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    with pytest.raises(SystemExit) as leaving:
        application.main(["memory", "--warmup", "50", str(tmp_path / "train.py")])
    assert leaving.value.code == 2
    assert "after 10 of the 51 steps that are needed (--warmup 50)" in capsys.readouterr().err


def test_run_without_memory_is_reported_as_not_measured(tmp_path: Path) -> None:
    source = Source(build_run(tmp_path / "run"))
    for name in ("memory_steps", "memory_modules"):
        message = PANELS[name].render(source)
        assert isinstance(message, NotMeasured)
        assert "backlight memory" in message.reason


def test_allocator_statistics_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.devices, "is_in_use", lambda: False)
    assert read_allocator() is None
    stats = {
        "allocated_bytes.all.peak": 600, "reserved_bytes.all.peak": 1000,
        "inactive_split_bytes.all.current": 50, "num_alloc_retries": 2,
    }  # fmt: skip
    monkeypatch.setattr(measure.devices, "is_in_use", lambda: True)
    monkeypatch.setattr(measure.torch.accelerator, "memory_stats", lambda device: stats)
    statistics = read_allocator()
    assert statistics == AllocatorStatistics(
        allocated_peak=600, reserved_peak=1000, inactive_split=50, retries=2, failures=0
    )
    assert statistics.fragmentation == pytest.approx(0.4)
