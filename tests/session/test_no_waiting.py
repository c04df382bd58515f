"""The step path reads no value from a device, which would synchronize the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import backlight
from backlight.capture import hub
from backlight.measure import transfer
from backlight.measure.stats import packed_matrices, statistics
from backlight.monitors.health import samples_monitor
from cases import CASES

READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.masked_select")


class Count(TorchDispatchMode):
    """Dispatch mode that counts operations that synchronize the host with a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if str(func).startswith(READS):
            self.reads[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Count]:
    # A mode of the script sees no operation of backlight: this one is left nowhere.
    with pytest.MonkeyPatch.context() as patch, Count() as count:
        patch.setattr(hub, "count_modes", lambda: 0)
        yield count


# Cases whose own step reads nothing, so every counted read is backlight's.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "clipped_by_norm", "two_optimizers_one_backward"),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("accumulation", "tied", "non_contiguous", "bfloat16_weights", "head_replaced")
        ),
    ],
)
def test_step_path_never_synchronizes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Take the code path of an accelerator on the CPU.
    for module in (statistics, packed_matrices):
        monkeypatch.setattr(module, "is_host", lambda _device: False)
    monkeypatch.setattr(samples_monitor, "is_accelerator", lambda _device: True)
    with counting() as alone:
        CASES[name].train()
    options = {"health": {"histogram": True}, "activations": {"every": 1, "rank": True}}
    watch = backlight.watch(run=tmp_path / "run", every=1, monitors="+activations", **options)
    with watch, counting() as watched:
        CASES[name].train()
    assert watched.calls > alone.calls, "the mode counted no operation of backlight"
    assert watched.reads == alone.reads
    assert any(
        name.startswith("activations/rank/") for name in backlight.open_run(tmp_path / "run").scalar_names()
    )


@pytest.mark.slow
def test_counting_mode_detects_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backlight.monitors.health.monitor import GradientMonitor

    measure = GradientMonitor.on_gradients_ready

    def reading(self: GradientMonitor, gradients: Any, record: Any) -> None:
        assert float(gradients.tensors[0].sum()) is not None
        measure(self, gradients, record)

    monkeypatch.setattr(GradientMonitor, "on_gradients_ready", reading)
    monkeypatch.setattr(samples_monitor, "is_accelerator", lambda _device: True)
    with backlight.watch(run=tmp_path / "run", every=1), counting() as count:
        CASES["plain"].train()
    assert count.reads["aten._local_scalar_dense.default"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "scaler_with_clipping",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("clipped_by_norm", "two_optimizers_one_backward")
        ),
    ],
)
def test_one_transfer_per_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"health": {"histogram": True}, "activations": {"every": 1}, "monitors": "+activations"}
    with backlight.watch(run=tmp_path / "usual", every=1, **options):
        CASES[name].train()
    sent = []
    original = transfer.start_copy
    # Treat the host as a device: every table is copied by the transfer.
    monkeypatch.setattr(transfer, "_travels_alone", lambda _table: False)
    monkeypatch.setattr(
        transfer, "start_copy", lambda table: (sent.append(table.numel()), original(table))[1]
    )
    with backlight.watch(run=tmp_path / "carried", every=1, **options):
        CASES[name].train()
    assert len(sent) == CASES[name].steps
    usual, carried = (backlight.open_run(tmp_path / run) for run in ("usual", "carried"))
    assert usual.scalar_names() == carried.scalar_names()
    sizes = [name for name in usual.scalar_names() if name.startswith("activations/")]
    assert sizes
    for scalar in ("loss", "clip/norm", "scaler/scale", "total_norm", *sizes):
        assert np.array_equal(usual.scalar(scalar).values, carried.scalar(scalar).values)
    for series, column in (
        ("gradient", "norm"),
        ("gradient", "zeros"),
        ("update", "ratio"),
        ("histogram", "b30"),
    ):
        one, other = (run.frame(series, column) for run in (usual, carried))
        assert np.array_equal(one.values, other.values, equal_nan=True)
        assert one.measured.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_step_never_synchronizes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64, device="cuda")
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1):
        for step in range(6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        torch.cuda.set_sync_debug_mode("default")
    run = backlight.open_run(tmp_path / "run")
    assert len(run.series_steps("gradient")) == 6
    assert not run.events("unmeasured") or run.events("unmeasured")[0].payload["what"].startswith(
        "device time"
    )
