"""A crash keeps what was recorded, and is named with its line and the command that explains it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backlight.report.source import Source
from backlight.report.verdict import explaining_command, outcome
from backlight.session.script_end import description
from backlight.store.read.run import open_run

HEAD = """
import sys, torch
from torch.utils.checkpoint import checkpoint
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
x = torch.ones(1, 2)
"""

LINE = HEAD.splitlines().index("    loss.backward()") + 1


def frozen() -> None:
    nn.Linear(2, 1)(torch.ones(1, 2)).detach().sum().backward()


def in_place() -> None:
    x = torch.ones(2, requires_grad=True) * 1.0
    y = x.exp()
    y.add_(1.0)
    y.sum().backward()


def twice() -> None:
    y = (torch.ones(2, requires_grad=True) ** 2).sum()
    y.backward()
    y.backward()


def unused() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    torch.autograd.grad(a.sum(), b)


def recomputed_otherwise() -> None:
    calls: list[int] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().exp() if len(calls) == 1 else x + 1

    y = checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    y.sum().backward()


def not_finite() -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        torch.zeros(2, requires_grad=True).sqrt().mul(0.0).sum().backward()


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize(
    ("crash", "command"),
    [
        (frozen, "why-no-grad"),
        (in_place, "why-no-grad"),
        (twice, "why-no-grad"),
        (unused, "why-no-grad"),
        (recomputed_otherwise, "check --recompute"),
        (not_finite, "nan"),
        (out_of_memory, "memory"),
    ],
)
def test_exceptions_of_torch_name_the_command_that_explains_them(
    crash: Callable[[], None], command: str
) -> None:
    with pytest.raises(RuntimeError) as raised:
        crash()
    found = description(raised.value, ())
    assert found["explained_by"] == command
    assert found["line"].partition(":")[0].endswith("test_crashes.py")
    assert found["in_backward"] == (crash is not out_of_memory)


def test_other_exceptions_name_no_command() -> None:
    with pytest.raises(ValueError, match="none of backward") as raised:
        raise ValueError("none of backward")
    assert description(raised.value, ())["explained_by"] == ""


def test_crash_in_the_first_backward_keeps_the_run(
    tmp_path: Path, console_script: Callable[..., Any]
) -> None:
    (tmp_path / "train.py").write_text(f"{HEAD}step(model(x).detach().sum())\n")
    done = console_script(tmp_path, "run", "--out", "run", "train.py", "--lr", "0.1")
    assert done.returncode == 1
    assert f"✕ Failed with RuntimeError in backward at step 0 (train.py:{LINE})." in done.stderr
    assert done.stderr.endswith("next: backlight why-no-grad train.py --lr 0.1\n")
    assert "mark_step" not in done.stderr
    run = open_run(tmp_path / "run")
    said = outcome(Source(run))
    assert said.headline == f"Failed with RuntimeError in backward at step 0 (train.py:{LINE})"
    assert said.detail.startswith(f"The script ended with RuntimeError at train.py:{LINE} in its first")
    assert "`backlight why-no-grad train.py --lr 0.1` explains it." in said.detail
    assert explaining_command(run) == "backlight why-no-grad train.py --lr 0.1"


def test_crash_before_the_first_backward_leaves_one_line(
    tmp_path: Path, console_script: Callable[..., Any]
) -> None:
    (tmp_path / "train.py").write_text(f"{HEAD}model(torch.ones(1, 3))\n")
    done = console_script(tmp_path, "run", "--out", "run", "train.py")
    assert done.returncode == 1
    line = HEAD.count("\n") + 1
    assert done.stderr.splitlines()[-1] == (
        f"backlight: nothing was measured: the script ended with RuntimeError at train.py:{line} before its "
        "first backward pass; removed run"
    )
    assert not (tmp_path / "run").exists()


def test_crash_after_some_steps_keeps_them(tmp_path: Path, console_script: Callable[..., Any]) -> None:
    (tmp_path / "train.py").write_text(
        f"{HEAD}for n in range(3):\n    step(model(x).sum())\nstep(model(x).detach().sum())\n"
    )
    console_script(tmp_path, "run", "--out", "run", "train.py")
    run = open_run(tmp_path / "run")
    assert run.series_steps("gradient").tolist() == [0, 1, 2]
    assert (
        outcome(Source(run)).headline == f"Failed with RuntimeError in backward at step 3 (train.py:{LINE})"
    )
