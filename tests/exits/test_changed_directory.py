"""A script that changes the working directory, as hydra does, is recorded to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import backlight

SCRIPT = """
import os, torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.makedirs("outputs")
{before}
os.chdir("outputs")
for step in range(300):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
{after}
"""

WAYS = {
    "run": (["-m", "backlight", "run", "--out", "runs/one"], "", ""),
    "watch": (
        [],
        'import backlight; watch = backlight.watch(model, optimizer, run="runs/one"); watch.__enter__()',
        "watch.__exit__(None, None, None)",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_written_where_it_began(way: str, tmp_path: Path) -> None:
    command, before, after = WAYS[way]
    (tmp_path / "train.py").write_text(SCRIPT.format(before=before, after=after), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    run = backlight.open_run(tmp_path / "runs" / "one")
    assert (run.status.value, run.coverage().with_loss, run.losses) == ("finished", 300, ())
    assert not list((tmp_path / "outputs").iterdir())
    assert done.stderr.rstrip().endswith("backlight report runs/one")
