"""The fused pass on an asynchronous device: its numbers against the eager ones, launches, and failures."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from launch_counts import MOST_LAUNCHES, gpt_steps, launches
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import backlight
from backlight.measure import transfer
from backlight.measure.stats import fused_rows as module
from backlight.measure.stats.compiled_rows import DTYPES, ROW
from backlight.measure.stats.statistics import statistics, why_not_compiled
from backlight.measure.stats.update import WeightSample
from backlight.measure.transfer import TransferBatch

SIZES = (0, 1, 31, 32, 33, 255, 257, ROW - 1, ROW, ROW + 1, 3 * ROW + 5)


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Compile for the simulated device, and return the devices for which that was done."""
    found: list[torch.device] = []

    def load(device: torch.device, source: bytes, names: Sequence[str]) -> module.Launch:
        found.append(device)
        return simulated.load_kernels(device, source, names)

    monkeypatch.setitem(module.LOADERS, "sim", load)
    monkeypatch.setattr(module, "_OF_DEVICE", {})
    return found


def special(dtype: torch.dtype) -> list[Tensor]:
    limits = torch.finfo(dtype)
    values = (
        [-0.0, 0.0], [limits.max, -limits.max], [limits.smallest_normal / 4, -limits.smallest_normal / 8],
        [1.0, math.nan], [-math.inf, 2.0], [math.inf, math.nan, math.nan, -1.0], [limits.tiny],
    )  # fmt: skip
    return [torch.tensor(one, dtype=dtype) for one in values]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_equal_the_eager_ones(dtype: torch.dtype) -> None:
    plain = [torch.randn(size).to(dtype) for size in SIZES]
    mixed = torch.cat([*special(dtype), torch.randn(ROW).to(dtype), *special(dtype)])
    given = [t.to("sim") for t in (*plain, *special(dtype), mixed)]
    given += [t.to("sim")[start:] for t in (plain[7], mixed) for start in (1, 3, 7)]
    fused, eager = (statistics(given, tier=tier).arrays() for tier in ("compiled", "eager"))
    assert not why_not_compiled()
    assert np.array_equal(fused[1], eager[1])
    assert np.array_equal(fused[0][:, 1], eager[0][:, 1], equal_nan=True)
    assert np.allclose(fused[0][:, 0], eager[0][:, 0], rtol=1e-14, atol=0, equal_nan=True)
    magnitude = np.array([float(t.cpu().double().abs().sum()) for t in given])
    finite = np.isfinite(magnitude)
    off = np.abs(fused[0][finite, 2] - eager[0][finite, 2])
    assert (off <= 1e-14 * magnitude[finite]).all()
    assert np.array_equal(fused[0][~finite, 2], eager[0][~finite, 2], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_of_16_bits_is_widened(dtype: torch.dtype) -> None:
    if dtype.itemsize == 4:
        bits = torch.randint(-(2**31), 2**31 - 1, (2**12,)).to(torch.int32)
    else:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    given = [*bits.view(dtype).to("sim").split(1)[:: 1 if dtype.itemsize == 4 else 16]]
    fused, eager = (statistics(given, tier=tier).arrays() for tier in ("compiled", "eager"))
    assert np.array_equal(fused[0], eager[0], equal_nan=True)
    assert np.array_equal(fused[1], eager[1])


def test_numbers_do_not_depend_on_the_address() -> None:
    values = torch.randn(2 * ROW + 77)
    shifted = [torch.cat((torch.ones(start), values)).to("sim")[start:] for start in (0, 1, 2, 3)]
    numbers, _ = statistics(shifted, tier="compiled").arrays()
    assert (numbers == numbers[0]).all()
    again, _ = statistics(shifted, tier="compiled").arrays()
    assert np.array_equal(numbers, again)


def test_what_it_cannot_read_stays_eager() -> None:
    dense = torch.randn(64, 48)
    given = [
        t.to("sim") for t in (dense, dense.double(), torch.randn(9, dtype=torch.complex64), dense.bfloat16())
    ]
    given += [given[0].t(), given[0][:, ::3], given[0][:1].expand(5, 48)]
    fused, eager = (statistics(given, tier=tier, scale=4.0).arrays() for tier in ("compiled", "eager"))
    assert np.allclose(fused[0], eager[0], rtol=1e-12, atol=1e-12)
    assert np.array_equal(fused[1], eager[1])


@pytest.mark.parametrize("per_tensor", [64, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates_equal_the_eager_ones(
    dtype: torch.dtype, per_tensor: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((0,), (1,), (7, 9), (300, 5), (), (1000,))
    weights = [torch.randn(shape).to(dtype).to("sim") for shape in shapes]
    old = [t.clone() for t in weights]
    results = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.delitem(module.LOADERS, "sim")
        for weight, before in zip(weights, old, strict=True):
            weight.data = before.clone()
        sample = WeightSample(weights, per_tensor=per_tensor)
        if is_fused:
            module.fused_rows(torch.device("sim:0")).wait()
        work = launches(sample.before)
        for weight in weights:
            weight.data.mul_(1.5).add_(0.25)
        weights[3].data = weights[3].data.float()  # another type, and another shape
        weights[5].data = weights[5].data[:500]
        results.append(sample.after().arrays())
        assert not is_fused or work == 3  # zeros, addresses, weights
    assert np.allclose(results[0][0], results[1][0], rtol=1e-14, atol=0)
    assert np.array_equal(results[0][1], results[1][1])
    assert results[0][1][:, 0].tolist() == [1, 1, 1, 1, 1, 0]


def test_addresses_are_sent_again_only_where_they_change() -> None:
    given = [torch.ones(100, device="sim") for _ in range(9)]
    other = [torch.full((100,), 2.0, device="sim") for _ in range(9)]
    statistics(given, tier="compiled")
    for tensors, uploads in ((given, 0), (other, 1), (other, 0), (given, 1)):
        pending = []
        # Kernel, join, copy to the host, and the addresses.
        assert launches(lambda t=tensors, p=pending: p.append(statistics(t))) == 3 + uploads
        assert (pending[0].arrays()[0][:, 1] == tensors[0][0].item()).all()
    with torch.Stream("sim"):  # which does not wait for what the other stream was sent
        assert launches(lambda: statistics(given)) == 4


def test_addresses_on_their_way_are_not_overwritten() -> None:
    given = [[torch.full((50,), float(value), device="sim")] for value in range(1, 9)]
    statistics(given[0], tier="compiled").arrays()
    simulated.sleep(0.1)  # the device is late
    pending = [statistics(tensors) for tensors in given]
    assert [one.arrays()[0][0, 1] for one in pending] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_numbers_that_nothing_reads_do_not_overwrite_addresses() -> None:
    given = [torch.full((50,), 3.0, device="sim")]
    module.fused_rows(torch.device("sim:0")).wait()
    simulated.sleep(0.2)  # the device is late
    statistics(given, tier="eager")  # which takes as much pinned memory as the first address
    gc.collect()
    assert statistics(given).arrays()[0][0, 1] == 3


def test_training_thread_allocates_no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPLOADS", transfer.PinnedBlock(transfer.UPLOAD_BYTES))
    given = [torch.ones(3, device="sim")]
    statistics(given, tier="eager").arrays()
    module.fused_rows(torch.device("sim:0")).wait()
    pinned = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **options: pinned.append(options.get("pin_memory")) or empty(*a, **options)
    )
    statistics(given)
    assert pinned
    assert not any(pinned)


def test_each_device_has_its_own(loads: list[torch.device]) -> None:
    given = [torch.full((5,), float(index), device=f"sim:{index}") for index in (0, 1, 0, 1)]
    numbers, _ = statistics(given, tier="compiled").arrays()
    assert numbers[:, 1].tolist() == [0, 1, 0, 1]
    assert loads == [torch.device("sim:0"), torch.device("sim:1")]
    statistics(given, tier="compiled")
    assert len(loads) == 2


def test_failed_compilation_leaves_the_eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> module.Launch:
        raise OSError("no NVRTC")

    monkeypatch.setitem(module.LOADERS, "sim", load)
    given = [torch.ones(4, device="sim")]
    assert statistics(given, tier="compiled").arrays()[0].tolist() == [[2, 1, 4]]
    assert why_not_compiled() == "sim:0: OSError: no NVRTC"
    sample = WeightSample(given)
    sample.before()
    assert sample.after().arrays()[0].tolist() == [[0, 2]]


def test_failed_launch_is_measured_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(name: str, blocks: int, arguments: Sequence[int]) -> None:
        raise RuntimeError("CUDA: invalid argument")

    monkeypatch.setitem(module.LOADERS, "sim", lambda *_: launch)
    given = [torch.ones(4, device="sim")]
    module.fused_rows(torch.device("sim:0")).wait()
    sample = WeightSample(given)
    sample.before()
    given[0].mul_(2)
    assert sample.after().arrays()[0].tolist() == [[2, 2]]
    assert statistics(given).arrays()[0].tolist() == [[4, 2, 8]]
    assert why_not_compiled() == "sim:0: RuntimeError: CUDA: invalid argument"


def test_operations_that_are_intercepted_stay_eager() -> None:
    class Notes(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    given = [torch.ones(4, device="sim")]
    module.fused_rows(torch.device("sim:0")).wait()
    with Notes() as notes:
        eager = launches(lambda: statistics(given))
    assert notes.calls
    assert launches(lambda: statistics(given)) < eager


def test_default_device_intercepts_nothing() -> None:
    given = [torch.full((4,), 2.0, device="sim")]
    module.fused_rows(torch.device("sim:0")).wait()
    statistics(given)
    pending = []
    with torch.device("sim"):
        assert launches(lambda: pending.append(statistics(given))) == 3
    assert pending[0].arrays()[0].tolist() == [[4, 2, 8]]


def test_recorded_step_of_148_tensors(tmp_path: Path) -> None:
    plain, weights = gpt_steps()
    module.fused_rows(torch.device("sim:0")).wait()
    watched, same = gpt_steps(run=tmp_path / "fused", every=4, monitors=("health",))
    assert all(map(torch.equal, weights, same))
    assert not why_not_compiled()
    added = [with_watch - without for with_watch, without in zip(watched, plain, strict=True)]
    assert 1 < min(added[::4]) <= max(added[::4]) <= MOST_LAUNCHES
    assert {count for step, count in enumerate(added) if step % 4} == {1}  # the loss
    del module.LOADERS["sim"]
    eager, _ = gpt_steps(run=tmp_path / "eager", every=4, monitors=("health",))
    assert eager[0] - plain[0] > 4 * MOST_LAUNCHES  # with the update of the weights
    runs = [backlight.open_run(tmp_path / name) for name in ("fused", "eager")]
    for series, column in (
        ("gradient", "norm"),
        ("gradient", "sum"),
        ("gradient", "max_abs"),
        ("update", "ratio"),
    ):
        frames = [run.frame(series, column) for run in runs]
        assert frames[0].measured.any()
        assert np.array_equal(frames[0].measured, frames[1].measured)
        assert np.allclose(frames[0].values, frames[1].values, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_nothing_is_launched_during_capture(tmp_path: Path) -> None:
    model = nn.Linear(8, 4).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 8, device="sim")

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    alone = launches(step)
    module.fused_rows(torch.device("sim:0")).wait()
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, summary=False):
        step()
        simulated.set_capturing(True)
        try:
            assert launches(step) == alone
        finally:
            simulated.set_capturing(False)
        step()
    assert len(backlight.open_run(tmp_path / "run").frame("gradient", "norm").steps) == 2


def test_scale_travels_with_the_numbers() -> None:
    given, scale = [torch.full((9,), 8.0, device="sim")], torch.tensor(4.0, device="sim")
    transfer = TransferBatch()
    pending = statistics(given, tier="compiled", scale=scale, transfer=transfer)
    transfer.start()
    assert pending.arrays()[0].tolist() == [[6, 2, 18]]
