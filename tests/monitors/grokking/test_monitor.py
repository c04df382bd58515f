"""The grokking monitor in a watched run: exact gradients, unchanged training, failures as warnings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backlight
from zoo import DropoutBlock

STEPS = 12
MEASURES = {"every": 2, "gram": 1, "mean_gradient": 1, "products": 1, "window": 1, "vectors": 2, "top_k": 3}


def build() -> tuple[DropoutBlock, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DropoutBlock()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(20, 6, generator=draw), torch.randint(3, (20,), generator=draw)


def sample_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def watched(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, samples: Any = None
) -> backlight.Watch:
    return backlight.watch(
        model, optimizer, run=path, monitors=("grokking",), grokking=MEASURES, samples=samples
    )


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    on_step: Callable[[int], None] = lambda _step: None,
    clip: float | None = None,
) -> None:
    x, y = data()
    torch.manual_seed(2)
    for step in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        on_step(step)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_is_unchanged_and_gradients_are_exact(tmp_path: Path, clip: float | None) -> None:
    plain, optimizer = build()
    truth: dict[int, dict[str, np.ndarray]] = {}

    def keep(step: int) -> None:
        truth[step] = {n: p.grad.numpy().copy() for n, p in plain.named_parameters() if p.grad is not None}

    train(plain, optimizer, keep, clip)
    model, optimizer = build()
    x, y = data()
    with watched(tmp_path / "run", model, optimizer, (sample_loss, (x[:8], y[:8]))):
        train(model, optimizer, clip=clip)
    assert_equal(model, plain)
    run = backlight.open_run(tmp_path / "run")
    assert [e for e in run.events("unmeasured") if "gram" in str(e.payload)] == []
    for name in truth[0]:
        steps, values = run.array(f"gradient/{name}")
        assert steps.tolist() == list(range(0, STEPS, 2))
        for step, value in zip(steps.tolist(), values, strict=True):
            assert np.array_equal(value, truth[step][name]), (name, step)
    assert {"gram/model/effective_rank", "gram/layer/head/trace", "window/trace", "gradient/norm"} <= set(
        run.scalar_names("backlight")
    )


@pytest.mark.slow
def test_gram_is_taken_before_step(tmp_path: Path) -> None:
    model, optimizer = build()
    model.body[3].p = 0.0
    x, y = data()
    x8 = (x[:8], y[:8])
    states: list[dict[str, torch.Tensor]] = []
    with watched(tmp_path / "run", model, optimizer, (sample_loss, lambda: x8)):
        train(model, optimizer, lambda _s: states.append(copy.deepcopy(model.state_dict())))
    steps, found = backlight.open_run(tmp_path / "run").array("gram/model/matrix")
    assert len(steps) == STEPS // 2
    for matrix, state in zip(found, states[::2], strict=True):
        model.load_state_dict(state)
        rows = []
        for i in range(8):
            model.zero_grad()
            sample_loss(model, (x[i : i + 1], y[i : i + 1])).backward()
            rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        A = torch.stack(rows)
        truth = (A @ A.T).numpy()
        assert np.allclose(matrix, truth, rtol=1e-5, atol=1e-7 * np.abs(truth).max())


@pytest.mark.slow
def test_accumulated_gradients_are_measured_once_per_step(tmp_path: Path) -> None:
    model, optimizer = build()
    model.eval()
    x, y = data()
    expected: dict[int, np.ndarray] = {}
    with watched(tmp_path / "run", model, optimizer, (sample_loss, (x, y))):
        for step in range(4):
            optimizer.zero_grad()
            for start in range(0, 20, 5):
                part = slice(start, start + 5)
                (sample_loss(model, (x[part], y[part])) / 20).backward()
            expected[step] = model.head.weight.grad.numpy().copy()
            optimizer.step()
    run = backlight.open_run(tmp_path / "run")
    for name in ("gradient/head.weight", "mean_gradient/head.weight"):
        steps, stored = run.array(name)
        assert steps.tolist() == [0, 2]
        for step, values in zip(steps.tolist(), stored, strict=True):
            np.testing.assert_allclose(values, expected[step], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_missing_samples_are_recorded_as_unmeasured(tmp_path: Path) -> None:
    model, optimizer = build()
    with watched(tmp_path / "run", model, optimizer) as watch:
        train(model, optimizer)
        watch.log(train_accuracy=0.5)
    run = backlight.open_run(tmp_path / "run")
    reasons = [event.payload["reason"] for event in run.events("unmeasured")]
    assert any("no samples=(loss_fn, batch)" in reason for reason in reasons)
    assert "window/trace" in run.scalar_names()
    assert not any(name.startswith("gram/") for name in run.array_names())
    assert run.scalar("train_accuracy", "user").values.tolist() == [0.5]


@pytest.mark.slow
def test_failed_check_is_warning_and_dropped_measurement(tmp_path: Path) -> None:
    def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])  # not the sum

    (model, optimizer), (plain, plain_optimizer) = build(), build()
    x, y = data()
    model.eval()
    plain.eval()
    train(plain, plain_optimizer)
    with pytest.warns(RuntimeWarning, match="gram is not measured") as warned:
        with watched(tmp_path / "run", model, optimizer, (mean_loss, (x[:8], y[:8]))):
            train(model, optimizer)
    assert len(warned) == 1
    assert_equal(model, plain)
    run = backlight.open_run(tmp_path / "run")
    assert len([e for e in run.events("unmeasured") if e.payload["what"] == "gram"]) == STEPS // 2
    assert "gradient/head.weight" in run.array_names()
    assert "gram/model/matrix" not in run.array_names()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": (sample_loss,)}, r"samples must be \(loss_fn, batch\)"),
        ({"samples": (sample_loss, data()), "monitors": ("health",)}, "samples are for the monitor grokking"),
        ({"grokking": {"grams": 1}}, r"unknown key 'grams'; did you mean 'gram'"),
        ({"grokking": {"window_steps": 1}}, "grokking.window_steps: 1: expected 2 or more"),
        ({"grokking": {"precision": "half"}}, "grokking.precision: 'half': expected float32 or float64"),
    ],
)
def test_invalid_samples_are_refused(given: dict[str, Any], message: str) -> None:
    model, optimizer = build()
    with pytest.raises(ValueError, match=message):
        backlight.watch(model, optimizer, **{"monitors": ("grokking",), **given})
