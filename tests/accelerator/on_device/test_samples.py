"""A step on an accelerator that is decomposed by samples on request, in the training process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.health.model.spike_samples import SAMPLES
from cases import assert_equal

STEPS, SPIKE, N, BAD = 40, 35, 8, 5


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def train(device: str, model: nn.Module, run: Path | None, *decompose: int) -> list[Tensor]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.to(device)
    x, y = torch.randn(STEPS, N, 6), torch.randint(0, 4, (STEPS, N))
    x[SPIKE, BAD] *= 1000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: Any = {"monitors": ("health",), "every": 1, "health": {"decompose": decompose}, "quiet": True}
    with backlight.watch(model, optimizer, run=run, **settings) if run else contextlib.nullcontext():
        for step in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x[step].to(device)), y[step].to(device)).backward()
            optimizer.step()
    return [tensor.detach().cpu() for tensor in model.state_dict().values()]


def test_requested_decomposition_changes_no_weight(tmp_path: Path) -> None:
    alone = train("sim", normed(), None)
    watched = train("sim", normed(), tmp_path / "run", 0, 3, SPIKE)
    assert_equal(alone, watched)
    found = backlight.open_run(tmp_path / "run").events(SAMPLES)
    assert [e.step for e in found] == [0, 3, SPIKE]
    assert all(e.payload["difference"] < 1e-5 for e in found)  # the masks of dropout are those of the step


def test_samples_of_a_requested_step_are_those_on_the_host(tmp_path: Path) -> None:
    tops = []
    for device in ("cpu", "sim"):
        train(device, plain(), tmp_path / device, SPIKE)
        run = backlight.open_run(tmp_path / device)
        (found,) = run.events(SAMPLES)
        assert found.payload["cause"] in {"norm", "loss"}  # both leap: the value that arrives first
        assert found.payload["reason"] == ""
        tops.append(found.payload["calls"][0]["top"])
        (spike,) = [f for f in evaluate_rules(run) if f.rule == "spike"]
        assert f"Sample {BAD} of {N} carries" in spike.detail
    for host, device in zip(*tops, strict=True):
        assert device["sample"] == host["sample"]
        for name in ("share", "norm", "loss", "without"):
            assert device[name] == pytest.approx(host[name], rel=1e-3, abs=1e-4)


def test_spike_that_was_not_requested_states_how_to_request_it(tmp_path: Path) -> None:
    train("sim", plain(), tmp_path / "run")
    run = backlight.open_run(tmp_path / "run")
    (found,) = run.events(SAMPLES)
    assert found.payload["calls"][0]["top"] == []
    (spike,) = [f for f in evaluate_rules(run) if f.rule == "spike"]
    assert f"--set health.decompose={SPIKE} " in spike.detail


def test_step_is_not_computed_again_without_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backlight.devices.free_memory", lambda _: 0)
    monkeypatch.setattr(
        "backlight.devices.allocator_statistics",
        lambda _=None: dict.fromkeys(
            (
                f"{kind}_bytes.all.{which}"
                for kind in ("allocated", "reserved")
                for which in ("current", "peak")
            ),
            1000,
        ),
    )
    alone = train("sim", plain(), None)
    assert_equal(alone, train("sim", plain(), tmp_path / "run", 3))
    found = next(e for e in backlight.open_run(tmp_path / "run").events(SAMPLES) if e.step == 3)
    assert found.payload["reason"] == "there was too little free memory on sim:0 for a pass more"
    assert [call["top"] for call in found.payload["calls"]] == [[]]
