"""Fixtures of the command tests: a run with a NaN, and the error of a refused command."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import backlight
from cases import build, loop


@pytest.fixture(scope="session")
def run_with_nan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train five steps with a NaN in the gradient of ``last.weight`` at step 2; return the run."""
    path = tmp_path_factory.mktemp("runs") / "run_with_nan"
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def write_nan(model: torch.nn.Module) -> None:
        if watch.step == 2:
            model.last.weight.grad[0, 0] = float("nan")

    with backlight.watch(model, optimizer, run=path, every=1, monitors=("health",)) as watch:
        loop(model, optimizer, write_nan, steps=5)
    return path


@pytest.fixture
def refused(command: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run a command that must be refused with exit code 2 and one line; return the line."""

    def run(*arguments: object) -> str:
        code, _, errors = command(*arguments)
        assert code == 2
        assert errors.count("\n") == 1
        assert "Traceback" not in errors
        return errors

    return run
