"""Modes and tensor subclasses of the script see no operation of backlight: they count, or draw numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Console = Callable[..., subprocess.CompletedProcess[str]]

TRAIN = """
import collections, contextlib, sys
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

seen = collections.Counter()

class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        seen[str(function)] += 1
        torch.rand(())  # a mode that draws: one operation more would change all that follows
        return function(*arguments, **(options or {}))

class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        seen["function"] += 1
        return function(*arguments, **(options or {}))

class Counted(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        seen["subclass"] += 1
        return super().__torch_function__(function, types, arguments, options or {})

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))
kind = sys.argv[1]
if kind == "subclass":
    model[0].weight = nn.Parameter(model[0].weight.data.as_subclass(Counted))
optimizer = torch.optim.Adam(model.parameters())
modes = {"dispatch": Dispatch, "function": Function}.get(kind, contextlib.nullcontext)
with modes():
    for step in range(12):
        optimizer.zero_grad()
        for _ in range(2):
            x, y = torch.randn(8, 4), torch.randint(3, (8,))
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
print(sorted(seen.items()), sum(p.sum().item() for p in model.parameters()))
"""


EVERY, PER_BACKWARD = ("--every", "1"), ("--set", "health.per_backward=true")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dispatch", EVERY), ("function", EVERY), ("subclass", PER_BACKWARD),
        *(pytest.param(kind, PER_BACKWARD, marks=pytest.mark.full) for kind in ("dispatch", "function")),
        pytest.param("subclass", EVERY, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_modes_see_what_they_see_without_backlight(
    kind: str, options: tuple[str, ...], tmp_path: Path, console_script: Console
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    plain = subprocess.run(
        [sys.executable, "train.py", kind], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    watched = console_script(tmp_path, "run", *options, "--out", "run", "train.py", kind)
    assert (watched.returncode, watched.stdout) == (0, plain.stdout), watched.stderr
    assert "not measured: everything" not in watched.stderr
