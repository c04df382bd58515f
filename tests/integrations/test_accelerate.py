"""A loop of Accelerate, in one process; two ranks are in test_huggingface.py."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import backlight


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Reset Accelerate's process-wide gradient state, which outlives an error."""
    yield
    from accelerate.state import GradientState

    GradientState._reset_state()


def train(
    run: Path | None,
    fails_at: int = -1,
    *,
    losses: list[float] | None = None,
    norms: list[float] | None = None,
    epochs: int = 1,
    **settings: Any,
) -> tuple[str, Any]:
    from accelerate import Accelerator

    from backlight.integrations.accelerate import watch
    from integrations.tiny import digest

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    x = torch.randn(64, 8)
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), 1e-2), DataLoader(TensorDataset(x, x[:, :1]), 8)
    )
    context = watch(accelerator, model, optimizer, run=run, **settings) if run else contextlib.nullcontext()
    with context:
        batches = itertools.chain.from_iterable(loader for _ in range(epochs))
        for index, (inputs, targets) in enumerate(batches):
            if index == fails_at:
                raise ValueError("injected")
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if losses is not None:
                    losses.append(loss.item())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    if norms is not None:
                        norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"train_loss": loss, "note": "no number"}, step=100 + index)
    assert accelerator.trackers == []
    return digest(plain), context


@pytest.mark.full
def test_gradients_and_accelerator_log_values_are_recorded(tmp_path: Path) -> None:
    plain, _ = train(None)
    found: list[Any] = []
    weights, context = train(tmp_path / "run", step=50, on_end=found.append)
    assert weights == plain
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("backwards").steps.tolist() == [50, 51, 52, 53]
    assert run.scalar("backwards").values.tolist() == [2.0] * 4
    np.testing.assert_allclose(run.scalar("total_norm").values, run.scalar("clip/norm").values, rtol=1e-5)
    assert run.scalar("step", source="user").values.tolist() == [102.0, 104.0, 106.0, 107.0]
    assert len(run.scalar("train_loss", source="user").steps) == 4
    assert "note" not in run.scalar_names("user")
    # Accelerate prefetches one batch; the recorded batch is the one that was trained on.
    assert run.scalar("batch").values.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert found == [context.findings]


@pytest.mark.parametrize("every", [1, 10**6], ids=["recorded", "not_recorded"])
def test_loss_of_every_step_is_the_mean_of_its_batches(tmp_path: Path, every: int) -> None:
    losses: list[float] = []
    norms: list[float] = []
    train(tmp_path / "run", losses=losses, norms=norms, epochs=4, every=every)
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("loss").steps.tolist() == list(range(16))
    np.testing.assert_allclose(run.scalar("loss").values, np.reshape(losses, (-1, 2)).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(run.scalar("clip/norm").values, norms, rtol=1e-6)
    assert run.loss_label() == "loss"


@pytest.mark.full
def test_raising_loop_leaves_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="injected"):
        train(tmp_path / "run", fails_at=5)
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "failed"
    assert run.last_step() == 1


@pytest.mark.full
def test_watch_unwraps_an_accelerate_optimizer(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(
        plain := nn.Linear(4, 1), torch.optim.SGD(plain.parameters(), lr=0.5)
    )
    with backlight.watch(model, optimizer, run=tmp_path / "run") as watch:
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    assert watch.step == 1
    assert backlight.open_run(tmp_path / "run").scalar("lr/0/0").values.tolist() == [0.5]
