"""Workers that are started by spawn, generators inside data sets, and samples of tensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.correctness.instrument.samples import VALUES, digest, sampled
from backlight.monitors.correctness.instrument.worker_seeds import copied_generator
from faults.silent.batches import Numbers, Stream, epochs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (Numbers(np.random.default_rng(0)), "generator"),
        # By fork they are in test_training_loop.py.
        pytest.param(Stream(is_split=False), "workers", marks=pytest.mark.full),
        pytest.param(Stream(is_split=True), None, marks=pytest.mark.full),
    ],
)
def test_workers_that_are_spawned(data: Dataset[Any], kind: str | None, tmp_path: Path) -> None:
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="spawn")
    with backlight.watch(run=tmp_path / "run", monitors=("correctness",)):
        epochs(loader, count=1)
    run = backlight.open_run(tmp_path / "run")
    assert [event.payload["kind"] for event in run.events("contradiction")] == ([kind] if kind else [])
    assert len(evaluate_rules(run)) == bool(kind)


class Jitter:
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, x: float) -> float:
        return x + self.rng.random()


class OfTransform(Dataset[float]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> float:
        return float(self.transform(index))


class SplitOnly(Numbers):
    """The generator is used when the data set is made."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index))


class NewForEachSample(Numbers):
    def __getitem__(self, index: int) -> Any:
        self.rng = np.random.default_rng(index)
        return self.rng.normal()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Numbers(np.random.default_rng(0)), "rng"),
        (Numbers(None), ""),
        (OfTransform(Jitter()), "transform.rng"),
        (OfTransform(abs), ""),
        (SplitOnly(np.random.default_rng(0)), ""),
        (NewForEachSample(np.random.default_rng(0)), ""),
        (Stream(is_split=True), ""),
        ([1, 2], ""),
        (None, ""),
    ],
)
def test_generator_that_samples_draw_from(data: Any, expected: str) -> None:
    assert copied_generator(data) == expected


def test_samples_follow_no_row_and_do_not_copy_the_tensor() -> None:
    x = torch.arange(64 * 28 * 28).reshape(64, 1, 28, 28)
    columns = {int(value) % 28 for value in sampled(x)}
    assert VALUES <= len(sampled(x)) <= 2 * VALUES
    assert sampled(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert len(columns) == 28
    turned = x.permute(3, 2, 1, 0)
    assert torch.equal(sampled(turned), sampled(turned.contiguous()))


def test_digest_depends_on_values_shape_and_kind() -> None:
    x = torch.arange(6.0)
    several = [x, x.reshape(2, 3), x + 1, x.numpy()[:5], x.numpy(), (x, 3), (x, "3"), {"x": x, "y": None}]
    found = [digest(one) for one in several]
    assert None not in found
    assert len(set(found)) == len(found)
    assert digest({"x": x.clone()}) == digest({"x": x})
    assert digest((x, object())) is None
