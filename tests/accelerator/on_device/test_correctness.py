"""Checks of the training loop on an asynchronous device: facts are those of the host, in few launches."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from launch_counts import MOST_LAUNCHES, gpt_steps, launches
from torch import nn

import backlight
from backlight.measure.stats import compiled_rows, fused_rows
from backlight.monitors.correctness.instrument.replicas import DigestReader
from backlight.monitors.correctness.instrument.samples import PendingCopies, Snapshot, first_values, sampled
from faults.silent import FAULTS

ERRORS = (
    "no_zero_grad", "zero_grad_of_the_model_only", "zero_grad_before_the_step",
    "zero_grad_at_every_microbatch", "clipped_before_backward", "clipped_behind_clearing",
    "mixture_of_softmaxes", "targets_of_one_class", "mean_of_each_microbatch",
    "frozen_while_a_gradient_is_left", "layer_left_out_of_the_optimizer", "average_copied_into_the_model",
    "state_restored_at_every_step", "weights_edited_before_backward", "rate_below_the_spacing",
    "weights_in_bfloat16", "step_that_updates_a_copy",
)  # fmt: skip


def facts(path: Path, name: str, device: str, *, is_wrong: bool) -> list[tuple[Any, ...]]:
    """Return the contradictions of a training loop, without what depends on its random numbers."""
    torch.manual_seed(0)
    with torch.device(device), backlight.watch(run=path, every=1, monitors=("correctness",), quiet=True):
        FAULTS[name].train(is_wrong)
    return [
        (event.step, {name: _plain(value) for name, value in event.payload.items()})
        for event in backlight.open_run(path).events("contradiction")
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return sorted(value) if isinstance(value, list) else None if isinstance(value, float) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ERRORS)
def test_facts_are_those_of_the_host(name: str, tmp_path: Path) -> None:
    host, device = (facts(tmp_path / kind, name, kind, is_wrong=True) for kind in ("cpu", "sim"))
    assert host
    assert device == host
    assert not facts(tmp_path / "control", name, "sim", is_wrong=False)


def test_steps_of_148_tensors_with_the_default_monitors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fused_rows.LOADERS, "sim", simulated.load_kernels)
    monkeypatch.setattr(fused_rows, "_OF_DEVICE", {})
    gc.collect()  # optimizers of other tests would be followed
    plain, weights = gpt_steps(16)
    fused_rows.fused_rows(torch.device("sim:0")).wait()
    watched, same = gpt_steps(16, run=tmp_path / "run", every=1)
    assert all(map(torch.equal, weights, same))
    added = [with_watch - without for with_watch, without in zip(watched, plain, strict=True)]
    assert max(added) <= MOST_LAUNCHES  # of steps 0 to 7, 13 and 14 all is compared
    assert max(added[1:]) <= 30
    assert backlight.open_run(tmp_path / "run").series_steps("gradient").size == 16


def test_snapshot_of_several_types_and_devices() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 300)).bfloat16()
    given = [p.detach().to("sim") for p in model.parameters()]
    given += [given[0].float().to(memory_format=torch.channels_last), torch.arange(7), torch.empty(0)]
    given.append(torch.full((3,), 2.0, device="sim:1"))
    before = [x.cpu().float() for x in given]
    copies = PendingCopies()
    snapshot = Snapshot([first_values(x) if x.ndim == 4 else sampled(x) for x in given])
    for x in given:
        x.add_(1)
    copies.add(snapshot.arrive, *snapshot.tables)
    calls: list[int] = []
    copies.add(lambda: calls.append(len(snapshot.arrays)))
    assert not calls  # in order
    copies.settle(wait=True)
    assert calls == [len(given)]
    for x, values in zip(before, snapshot.arrays, strict=True):
        flat = x.permute(0, 2, 3, 1).reshape(-1) if x.is_contiguous(memory_format=torch.channels_last) else x
        assert set(values.tolist()) <= set(flat.reshape(-1).tolist())
        assert min(x.numel(), 200) <= len(values) <= 512


def test_values_are_copied_behind_the_stream_that_makes_them() -> None:
    copies, values = PendingCopies(), []
    stream = torch.Stream("sim")
    with stream:
        simulated.sleep(0.05)
        late = torch.ones(4, device="sim") * 3
    copies.add(lambda array: values.append(array.tolist()), late)
    with stream:
        copies.add(lambda array: values.append(array.tolist()), late + 1)
    copies.settle(wait=False)
    copies.settle(wait=True)
    assert values[1] == [4, 4, 4, 4]


def test_digests_of_the_fused_pass_are_those_of_the_eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_rows, "_OF_DEVICE", {})
    shapes = ((1,), (7, 9), (300, 5), (70_000,), (2, 65_536))
    given = [torch.randn(shape).to(dtype).to("sim") for shape in shapes for dtype in compiled_rows.DTYPES]
    given += [given[1].double(), given[3].t(), torch.tensor([-0.0, torch.nan, torch.inf]).to("sim")]
    given.append(torch.arange(9, device="sim"))
    eager_values, eager = DigestReader().read(given)
    expected = eager(*[value.cpu().numpy() for value in eager_values])
    monkeypatch.setitem(fused_rows.LOADERS, "sim", simulated.load_kernels)
    fused_rows.fused_rows(torch.device("sim:0")).wait()
    reader = DigestReader()
    reader.read(given[:15])
    assert launches(lambda: reader.read(given[:15])) == 3  # one per type; their addresses are there
    values, fused = reader.read(given)
    digests, norms = fused(*[value.cpu().numpy() for value in values])
    assert np.array_equal(digests, expected[0])
    assert np.allclose(norms, expected[1], rtol=1e-3, equal_nan=True)
