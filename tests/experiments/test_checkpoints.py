"""Checkpoints: exact restore, no code execution, damaged files are skipped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backlight.experiments.checkpoints import CheckpointError, newest, restore, save, training_state
from backlight.experiments.config import build

STATE: dict[str, Any] = {
    "tensors": [torch.arange(6.0).reshape(2, 3), torch.tensor(True), torch.zeros(0, 4)],
    "narrow": torch.tensor([1.5, 1e-30], dtype=torch.bfloat16),
    "wide": torch.tensor([1j], dtype=torch.complex128),
    "betas": (0.9, 0.98),
    "by_number": {0: {"step": torch.tensor(3.0)}, "x": None},
    "big": [2**70, "text", True],
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_every_kind_of_value_is_restored(tmp_path: Path) -> None:
    save(tmp_path, 7, STATE)
    step, state = newest(tmp_path) or (0, {})
    assert step == 7
    assert same(state, STATE)
    with pytest.raises(TypeError, match="holds tensors and plain values, got object"):
        save(tmp_path, 8, {"x": object()})


def test_view_is_saved_without_its_storage(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"row": torch.zeros(1000, 1000)[0]})
    assert path.stat().st_size < 100_000


def test_file_with_code_is_not_executed(tmp_path: Path) -> None:
    torch.save({"x": Path("/")}, tmp_path / "step-000000001.pt")
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        newest(tmp_path)


def test_newest_readable_checkpoint_is_used_and_old_ones_are_removed(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    for step in (10, 20, 30):
        path = save(tmp_path, step, {"at": step}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000020.pt", "step-000000030.pt"]
    path.write_bytes(path.read_bytes()[:100])
    assert newest(tmp_path) == (20, {"at": 20})
    (tmp_path / "step-000000020.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        newest(tmp_path)


def test_state_of_another_model_is_refused() -> None:
    state = training_state(build()) | {"model": {"wrong": torch.zeros(1)}}
    with pytest.raises(CheckpointError, match="does not fit this experiment"):
        restore(build(), state)


def test_random_states_are_restored() -> None:
    task = build()
    state = training_state(task)
    drawn = torch.rand(3), random.random(), np.random.rand()
    restore(task, state)
    again = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]
