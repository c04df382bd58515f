"""The fingerprint of a live run: taken without a trace in the process that it describes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from cases import build, loop

pytestmark = pytest.mark.slow


def warn() -> None:
    warnings.warn("an old name", FutureWarning, stacklevel=1)


def test_warning_that_python_shows_once_stays_one(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
            for _ in range(4):
                warn()
                nn.Identity()  # as models that generate between two steps: the modules have changed
                loop(model, optimizer, steps=1)
    assert [str(one.message) for one in shown] == ["an old name"]


@pytest.fixture
def matmul() -> Iterator[Any]:
    """The switches of products on CUDA, restored after the test."""
    switches = torch.backends.cuda.matmul
    before = switches.fp32_precision
    yield switches
    switches.fp32_precision = before


@pytest.mark.parametrize(("precision", "recorded"), [("tf32", "tf32 on cuda"), ("ieee", "highest")])
def test_matmul_precision_by_backend_is_recorded(
    precision: str, recorded: str, tmp_path: Path, matmul: Any
) -> None:
    matmul.fp32_precision = precision
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
        loop(model, optimizer, steps=3)
    stored = backlight.open_run(tmp_path / "run").fingerprint()
    assert stored is not None
    assert stored.flags["matmul_precision"] == recorded
