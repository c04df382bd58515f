"""Tests of training code: each trains 20 steps, and fails with the findings.

pytest examples/ci/test_training.py
TRAINED=body pytest examples/ci/test_training.py    # the head is in no optimizer: both tests fail
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return the model, and an optimizer of what is to be trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    trained = model[0] if os.environ.get("TRAINED") == "body" else model
    return model, torch.optim.AdamW(trained.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train on random data."""
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_block_trains(backlight_watch: Any) -> None:
    """The fixture watches a block."""
    model, optimizer = build()
    with backlight_watch(model, optimizer, fail_on="warning"):
        train(model, optimizer, steps=20)


@pytest.mark.backlight(steps=20, fail_on="warning")
def test_program_trains() -> None:
    """The marker watches the whole test, and ends it after 20 steps."""
    train(*build(), steps=1000)
