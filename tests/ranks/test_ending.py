"""Unmodified scripts under torchrun: complete, with a killed rank, and restarted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backlight.records import RunStatus
from backlight.store.read.run import open_run
from ranks.launching import HERE, launched, torchrun
from ranks.network import Whole

SCRIPT = HERE / "script.py"


def watched(run: Path) -> tuple[str, ...]:
    return "-m", "backlight", "run", "--out", str(run), "--every", "1"


@pytest.mark.full
def test_every_rank_watches_an_unmodified_torchrun_script(tmp_path: Path) -> None:
    torchrun(2, SCRIPT, tmp_path / "plain")
    torchrun(2, *watched(tmp_path / "run"), SCRIPT, tmp_path / "watched")
    for rank in range(2):
        one, other = (torch.load(tmp_path / name / f"{rank}.pt") for name in ("plain", "watched"))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    run, whole = open_run(tmp_path / "run"), Whole().run()
    assert run.attempts[0].ranks == (0, 1)
    np.testing.assert_allclose(run.scalar("total_norm").values, whole.total, rtol=1e-9)
    assert not run.losses


@pytest.mark.full
def test_killed_rank_and_torchrun_restart(tmp_path: Path) -> None:
    options = ("--max-restarts", "1")
    status, errors = launched(
        2, *watched(tmp_path / "run"), SCRIPT, tmp_path / "out", "kill", options=options
    )
    assert status == 0, errors[-2000:]
    run = open_run(tmp_path / "run")
    first, second = run.attempts
    assert first.ranks == second.ranks == (0, 1)
    # At most the last flush interval may be lost.
    states = {state.rank: state for state in run.ranks(0)}
    assert states[1].status is RunStatus.KILLED
    assert states[1].last_step == 3
    assert states[0].status is not RunStatus.FINISHED
    assert any("attempt 0, rank 1: its process was killed" in loss for loss in run.losses)
    assert (second.status, second.step_offset) == (RunStatus.FINISHED, 4)
    assert run.scalar("total_norm").steps.tolist() == list(range(10))
    assert {s.last_step for s in run.ranks()} == {9}
    frame, whole = run.frame("gradient", "norm", attempt=0), Whole().run()
    p = frame.names.index("block.up.weight")
    expected = [at["gradient", "norm", "block.up.weight"] for at in whole.at]
    np.testing.assert_allclose(frame.values[:4, p], expected, rtol=1e-9)
    # The restarted training, four steps later on the step axis of the run.
    again = run.frame("gradient", "norm", attempt=1)
    assert again.steps.tolist() == list(range(4, 10))
    np.testing.assert_allclose(again.values[:4, p], expected, rtol=1e-9)
