"""A run whose one gradient became NaN, for tests of what is said of such a run."""

from pathlib import Path
from typing import Any

import torch

import backlight
from cases import build, loop


def write_spoiled(path: Path, **settings: Any) -> Path:
    """Train five steps with a NaN in ``last.weight`` at step 2, watched with ``settings``; return the run."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def spoil(model: torch.nn.Module) -> None:
        if watch.step == 2:
            model.last.weight.grad[0, 0] = float("nan")

    with backlight.watch(model, optimizer, run=path, every=1, **settings) as watch:
        loop(model, optimizer, spoil, steps=5)
    return path
