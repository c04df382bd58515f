"""A script under ``backlight run`` finds modules, environment and random generators as under Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.records import RunStatus
from backlight.store.read.run import open_run
from processes import run_captured

Console = Callable[..., subprocess.CompletedProcess[str]]

PRELOADED = {"backlight", "click", "msgspec", "typing_extensions"}
"""Packages that may be loaded before the script's first line; ``-X importtime`` shows who loads another."""


def test_nothing_that_draws_or_reads_the_environment_is_loaded_before_the_script(
    tmp_path: Path, console_script: Console
) -> None:
    (tmp_path / "modules.py").write_text("import json, sys\nprint(json.dumps(sorted(sys.modules)))\n")
    watched = console_script(tmp_path, "run", "modules.py")
    assert watched.returncode == 0, watched.stderr
    loaded = {name.partition(".")[0] for name in json.loads(watched.stdout)}
    plain = subprocess.run(
        [sys.executable, "modules.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    loaded -= {name.partition(".")[0] for name in json.loads(plain.stdout)}
    extra = {name for name in loaded - sys.stdlib_module_names if not name.startswith("_sysconfigdata")}
    assert extra <= PRELOADED
    assert "backlight" in extra, "the comparison saw no module of the watched process"


GENERATORS = """
import os, random, sys
os.environ["OMP_NUM_THREADS"] = "1"
random.seed(1)
drawn = [random.random()]
import torch
import numpy
numpy.random.seed(2)
torch.manual_seed(3)
drawn.append(torch.get_num_threads())
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(5):
    model(torch.randn(8, 3)).square().mean().backward()
    if step == 3:
        model[0].weight.grad.fill_(float("nan"))  # a finding, and a line about it, while the script runs
    optimizer.step()
    optimizer.zero_grad()
    drawn.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
import rich.console  # draws from random where this is its first import
drawn.append(random.getstate()[1][:8])
print(drawn, type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)
"""


def test_generators_and_environment_are_those_of_plain_python(
    tmp_path: Path, console_script: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(GENERATORS)
    plain = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    watched = console_script(tmp_path, "run", "--out", "run", "--every", "1", "train.py")
    assert watched.returncode == 0, watched.stderr
    assert "NaN" in watched.stderr
    assert watched.stdout == plain.stdout


WATCH = """
import random, sys
import torch
def build():
    random.seed(1)
    torch.manual_seed(2)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def train(model, optimizer):
    for _ in range(5):
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
train(*build())
print(random.random(), torch.rand(1).item())
model, optimizer = build()
import backlight
with backlight.watch(model, optimizer, run="run") as watch:
    train(model, optimizer)
loaded = sorted({"rich"} & set(sys.modules))
print(watch.findings, file=sys.stderr)
assert "rich" in sys.modules
print(random.random(), torch.rand(1).item())
print(watch.is_recorded, loaded)
"""


def test_watch_and_printed_findings_leave_the_generators(tmp_path: Path) -> None:
    done = run_captured([sys.executable, "-c", WATCH], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plain, watched, last = done.stdout.splitlines()
    assert watched == plain
    assert last == "True []", "a watch that finds nothing needs no rich"


def test_script_that_imports_no_torch_leaves_no_run(tmp_path: Path, console_script: Console) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint('done')\nsys.exit(3)\n")
    watched = console_script(tmp_path, "run", "--out", "run", "plain.py")
    assert (watched.returncode, watched.stdout) == (3, "done\n")
    assert watched.stderr == "backlight: plain.py ended without importing torch: no run recorded\n"
    assert not (tmp_path / "run").exists()


def test_refusal_ends_the_script_at_its_import_of_torch(tmp_path: Path, console_script: Console) -> None:
    (tmp_path / "train.py").write_text(
        "print('before')\ntry:\n    import torch\nexcept Exception:\n    pass\nprint('after')\n"
    )
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    watched = console_script(tmp_path, "run", "--out", "taken", "train.py")
    assert (watched.returncode, watched.stdout) == (2, "before\n")
    assert watched.stderr.startswith("backlight: taken: is not a backlight run and not empty")
    assert watched.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--monitors", "helth"],
            "--monitors: no monitor is called 'helth'; expected some of: activations, ",
        ),
        (["--stop-on", "spke"], "--stop-on: no severity or rule is called 'spke'; did you mean 'spike'?"),
        (["--tracker", "wandbb"], "--tracker: no tracker is called 'wandbb'; did you mean 'wandb'?"),
        (["--config", "a.toml"], "a.toml: stop_on: no severity or rule is called 'nam'"),
    ],
)
def test_names_are_checked_before_a_script_without_torch(
    tmp_path: Path, console_script: Console, arguments: list[str], line: str
) -> None:
    (tmp_path / "plain.py").write_text("print('begun')\n")
    (tmp_path / "a.toml").write_text("stop_on = 'nam'")
    watched = console_script(tmp_path, "run", *arguments, "plain.py")
    assert (watched.returncode, watched.stdout) == (2, "")
    assert watched.stderr.startswith(f"backlight: {line}")
    assert watched.stderr.count("\n") == 1


def test_torch_of_a_forked_child_is_not_watched(tmp_path: Path, console_script: Console) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nchild = os.fork()\nimport torch\n"
        "if not child:\n    os._exit(0)\nos.waitpid(child, 0)\n"
        "model = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n"
    )
    watched = console_script(tmp_path, "run", "--out", "run", "train.py")
    assert watched.returncode == 0, watched.stderr
    assert watched.stderr.count("recording in run") == 1
    assert len(list((tmp_path / "run").glob("attempt-*"))) == 1


BREAKING = """
import json, time
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
system_time = time.time
for step in range(30):
    if step == 10:
        time.time = lambda: system_time() - 86_400  # the clock is set back
        json.dumps = json.loads = None
    if step == 20:
        time.time = time.perf_counter = None
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_script_that_replaces_what_others_use_is_recorded_to_its_end(
    tmp_path: Path, console_script: Console
) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING)
    done = console_script(tmp_path, "run", "-o", "run", "breaking.py")
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.status is RunStatus.FINISHED
    assert not run.losses
    assert run.last_step() == 29
    (attempt,) = run.attempts
    assert attempt.ended is not None
    assert 0 < attempt.ended - attempt.started < 3600
    assert (np.diff(run.scalar("time").values) > 0).all()
