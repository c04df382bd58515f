"""Rank and world size from the process group, and the run directory that the ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from backlight.distributed import launch_id, local_rank, rank_and_size
from backlight.store.write.attempt import default_path

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_LOCALID",
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "TORCHELASTIC_RUN_ID", "BACKLIGHT_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def grouped(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)


def test_single_process_is_rank_zero() -> None:
    assert rank_and_size() == (0, 1)
    assert local_rank() == 0
    assert launch_id() is None


def test_launcher_variables_are_used_before_a_group_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_and_size() == (3, 8)
    assert local_rank() == 1


def test_process_group_is_used_without_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning starts its processes without setting RANK.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    grouped(monkeypatch, 1, 2)
    assert rank_and_size() == (1, 2)
    assert "1234" in (launch_id() or "")
    monkeypatch.delenv("LOCAL_RANK")
    assert local_rank() == 1
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert local_rank() == 0


def test_each_launch_has_one_run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_path("train.py", "a-1")
    assert first.parent == Path("runs")
    assert first.name.startswith("train-")
    first.mkdir(parents=True)  # rank 0 created it
    assert default_path("train.py", "a-1") == first
    assert default_path("train.py", "a-2") != first
    alone = default_path("train.py")
    alone.mkdir(parents=True)
    assert default_path("train.py") != alone
