"""A run whose backward passes were all ended by an exception."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import backlight


@pytest.mark.slow  # it starts the watchdog process
@pytest.mark.parametrize("fails", [True, False])
def test_marking_steps_is_no_advice_where_backward_never_ended(
    fails: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(4, 2)

    def stop(gradient: torch.Tensor) -> None:
        if fails:
            raise SystemExit(0)

    with backlight.watch(model, run=tmp_path / "run"):
        out = model(torch.randn(3, 4))
        out.register_hook(stop)
        with contextlib.suppress(SystemExit):
            out.sum().backward()
    printed = " ".join(capsys.readouterr().err.split())
    raised = "an exception ended the only backward pass, and no optimizer step was seen"
    assert (raised in printed.lower()) == fails
    assert ("call watch.mark_step() after each" in printed) != fails
