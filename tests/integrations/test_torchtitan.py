"""Loops in the style of torchtitan, and its trainer's interface."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backlight
from backlight.integrations.torchtitan import watch
from integrations.torchrun import start


class Trainer:
    """A stand-in for torchtitan's trainer with the attributes that the integration reads."""

    def __init__(self, restored: int = 0) -> None:
        torch.manual_seed(0)
        self.restored = restored
        self.model_parts = [nn.Linear(4, 1)]
        optimizer = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
        self.optimizers = SimpleNamespace(optimizers=[optimizer], param_groups=[])
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.metrics_processor = SimpleNamespace(logger=self)
        self.step = 0

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append((metrics, step))

    def train_step(self, data: Any) -> None:
        (optimizer,) = self.optimizers.optimizers
        optimizer.zero_grad()
        loss = self.model_parts[0](next(data)).square().mean()
        loss.backward()
        optimizer.step()
        self.metrics_processor.logger.log({"loss_metrics/global_avg_loss": loss.item()}, self.step)

    def train(self) -> None:
        self.step = self.restored  # as its checkpointer does at the start of train()
        data = iter([torch.ones(2, 4)] * 10)
        while self.step < self.restored + 3:
            self.step += 1
            self.train_step(data)


def test_trainer_is_watched_from_its_restored_step(tmp_path: Path) -> None:
    trainer = Trainer(restored=7)
    logger = trainer.metrics_processor.logger
    with watch(trainer, run=tmp_path / "run", summary=False):
        assert not (tmp_path / "run").exists()
        trainer.train()
    assert trainer.metrics_processor.logger is logger
    assert "train_step" not in vars(trainer)
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("loss").steps.tolist() == [7, 8, 9]
    logged = run.scalar("loss_metrics/global_avg_loss", source="user")
    assert logged.steps.tolist() == [7, 8, 9]
    np.testing.assert_allclose(logged.values, [m["loss_metrics/global_avg_loss"] for m, _ in trainer.logged])
    assert run.scalar("step", source="user").values.tolist() == [8.0, 9.0, 10.0]


def test_raising_trainer_leaves_a_failed_run(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.model_parts[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), watch(trainer, run=tmp_path / "run", summary=False):
        trainer.train()
    assert backlight.open_run(tmp_path / "run").status.value == "failed"


def test_object_without_model_and_optimizers_is_rejected() -> None:
    with pytest.raises(TypeError, match="got Linear and NoneType; expected a torchtitan Trainer"):
        watch(nn.Linear(1, 1))


@pytest.mark.full
@pytest.mark.parametrize(("mode", "ranks"), [("fsdp", 2), ("tp", 2), ("both", 4)])
def test_sharded_norms_equal_those_used_by_clipping(tmp_path: Path, mode: str, ranks: int) -> None:
    results = {}
    for variant in ("plain", "watched"):
        start(ranks, "titan_loop.py", str(tmp_path), mode, variant)
        files = [tmp_path / f"{mode}-{variant}-{rank}.json" for rank in range(ranks)]
        results[variant] = [json.loads(file.read_text()) for file in files]
    assert results["plain"] == results["watched"]
    run = backlight.open_run(tmp_path / f"{mode}-run")
    norms = results["watched"][0]["norms"]
    assert min(norms) > 0.5  # every step was clipped
    np.testing.assert_allclose(run.scalar("total_norm").values, norms, rtol=1e-5)
    np.testing.assert_allclose(run.scalar("clip/norm").values, norms, rtol=1e-6)
    assert run.scalar("clip/limit").values.tolist() == [0.5] * 5
    assert run.scalar("backwards").values.tolist() == [2.0] * 5
    # The optimizer container has its own, unused learning rate.
    np.testing.assert_allclose(run.scalar("lr/0/0").values, 0.01 * 0.5 ** np.arange(5))
