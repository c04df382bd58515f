"""The writer thread stores as fast as steps are recorded, although it pauses for the thread that trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.session.step_recorder import MAX_QUEUED_RECORDS
from backlight.store.format.schema import DROPPED

pytestmark = pytest.mark.slow


def test_many_recorded_steps_are_all_stored(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    steps, x = 6 * MAX_QUEUED_RECORDS, torch.ones(2, 4)
    with backlight.watch(
        model, optimizer, run=tmp_path / "run", every=1, monitors=("health",), summary=False
    ):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    run = backlight.open_run(tmp_path / "run")
    assert not run.events(DROPPED)
    assert run.series_steps("gradient").tolist() == list(range(steps))
