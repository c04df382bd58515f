"""Objects whose constructor raised, and that the kept exception keeps alive, are passed over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from backlight.diagnose.profile.optimizations import read_live_objects

SCRIPT = """
import torch
from torch.utils.data import DataLoader

class Broken(DataLoader):
    def __init__(self):
        self.hidden = 1  # before the constructor of DataLoader
        raise ValueError("broken")

kept = []
for build in (
    Broken,
    lambda: DataLoader([1, 2], num_workers=-1),
    lambda: DataLoader([1, 2], batch_size=0),
    lambda: iter(DataLoader([1, 2], timeout=1, num_workers=0)),
    lambda: torch.optim.SGD([], lr=1.0),
    lambda: torch.optim.SGD([torch.zeros(1)], lr=-1.0),
):
    try:
        build()
    except Exception as error:
        kept.append(error)
assert len(kept) >= 5, kept
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(6, 2), batch_size=2):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
print("kept", len(kept), "steps", 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "profile"])
def test_half_built_loaders_and_optimizers_are_passed_over(tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--out", "run"] if command == "run" else ["--timed", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "backlight", command, *options, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "kept" in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert "not recorded" not in done.stderr
    assert "disabled" not in done.stderr
    assert command == "profile" or done.returncode == 0


def test_loaders_that_are_half_built_are_described() -> None:
    kept = []
    try:
        DataLoader([1], num_workers=-1)
    except ValueError as error:
        kept.append(error)
    live = read_live_objects([torch.nn.Linear(1, 1)], [])
    assert kept
    assert live.loaders
