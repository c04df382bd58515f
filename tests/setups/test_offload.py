"""Correct numbers with offloaded tensors and mixed dtypes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import backlight
from setups.matrix import launch
from setups.truth import Noted, net, train, watched


def test_offloaded_saved_tensors(tmp_path: Path) -> None:
    def offloaded(model: nn.Module, x: Tensor, y: Tensor) -> None:
        with save_on_cpu():
            F.cross_entropy(model(x), y).backward()

    def run() -> Noted:
        model = net()
        return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), backward=offloaded)

    _, stored = watched(run, tmp_path / "run", monitors="health,stalls,steptime")
    assert not stored.events("unmeasured")


def scaled(path: Path | None, scale: float) -> tuple[list[Tensor], list[float]]:
    """Train with two optimizers and one scaler in fp16 autocast; return weights and norms."""
    model = net()
    body = [p for name, p in model.named_parameters() if not name.startswith("last")]
    one, two = torch.optim.SGD(body, lr=0.1), torch.optim.AdamW(model.last.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    norms: list[float] = []
    watch: Any = warnings.catch_warnings()
    if path is not None:
        watch = backlight.watch(model, (one, two), run=path, monitors="health", every=1)
    draw = torch.Generator().manual_seed(4)
    with watch:
        for _ in range(6):
            x, y = torch.randn(6, 32, generator=draw), torch.randint(80, (6,), generator=draw)
            one.zero_grad()
            two.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            now = scaler.get_scale()
            grads = [p.grad.double() / now for p in model.parameters()]  # type: ignore[union-attr]
            norms.append(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))
            for optimizer in (one, two):
                scaler.step(optimizer)
            scaler.update()
    return [p.detach().clone() for p in model.parameters()], norms


@pytest.mark.parametrize("scale", [256.0, 2.0**20], ids=["fits", "overflows"])
def test_two_optimizers_under_a_growing_and_skipping_scaler(scale: float, tmp_path: Path) -> None:
    alone, norms = scaled(None, scale)
    watched_weights, _ = scaled(tmp_path / "run", scale)
    assert all(torch.equal(one, other) for one, other in zip(alone, watched_weights, strict=True))
    run = backlight.open_run(tmp_path / "run")
    assert not run.events("unmeasured")
    scales, skipped = run.scalar("scaler/scale").values, run.scalar("scaler/skipped").values
    assert scales[0] == scale
    assert len(set(scales)) > 1
    assert bool(skipped.any()) == (scale > 1e6)
    assert not skipped.all()
    found = run.scalar("total_norm").values
    finite = np.isfinite(norms)
    assert list(np.isfinite(found)) == list(finite)
    # An overflowed gradient is recorded and its step skipped; finite gradients are unscaled.
    np.testing.assert_allclose(found[finite], np.array(norms)[finite], rtol=1e-5)


@pytest.mark.full
@pytest.mark.alone
def test_fsdp_with_cpu_offload_and_bfloat16(tmp_path: Path) -> None:
    found = launch([("identical", "FSDP2, offloaded"), ("identical", "FSDP2, bf16")], tmp_path)
    assert {outcome.word for outcome in found.values()} == {"tested"}
    assert launch([("health", "FSDP2, offloaded")], tmp_path / "health")
