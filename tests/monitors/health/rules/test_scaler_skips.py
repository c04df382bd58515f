from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backlight.monitors.health.rules.loss_scale import LossScaleLimits, calibrated
from backlight.records import Severity


def skips(*rows: int, steps: int = 150) -> dict[str, Any]:
    values = np.zeros(steps)
    values[list(rows)] = 1.0
    return {"scaler/skipped": values, "scaler/scale": np.full(steps, 1024.0)}


def rms_of(steps: int = 150) -> dict[str, list[float]]:
    return {"a": [1e-2] * steps}


def test_frequent_skips_are_found(synthetic: Any, evaluated: Any) -> None:
    run = synthetic(rms_of(), scalars=skips(0, 1, 2, *range(20, 150, 8)))
    (finding,) = evaluated(run, "loss_scale")
    assert finding.severity is Severity.WARNING
    assert finding.subject.step == 20
    assert finding.evidence[0].path == "scalars/scaler/skipped"


@pytest.mark.slow
def test_calibration_and_rare_skips_have_no_finding(synthetic: Any, evaluated: Any) -> None:
    for rows, steps in ((range(17), 150), ((0, 1, 70, 140), 150), ((0, *range(20, 40, 4)), 40)):
        assert not evaluated(synthetic(rms_of(steps), scalars=skips(*rows, steps=steps)), "loss_scale")
    assert not evaluated(synthetic(rms_of()), "loss_scale")


def test_calibration_ends_with_settled_steps() -> None:
    limits = LossScaleLimits()
    assert calibrated(np.array([True] * 17 + [False] * 30), limits) == 17
    assert calibrated(np.array([True, False] * 60), limits) == limits.skips_calibration
    assert calibrated(np.zeros(100, dtype=bool), limits) == 0


def train(recorder: Any, broken_from: int | None) -> Any:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def loss_of(step: int) -> torch.Tensor:
        loss = (model(torch.randn(8, 6)) - 1).square().mean()
        return loss * float("nan") if broken_from is not None and step >= broken_from else loss

    return recorder(model, optimizer).fit(optimizer, 80, loss_of, scaler=scaler)


@pytest.mark.slow
def test_scaler_that_skips_every_step_is_an_error(recorder: Any, evaluated: Any) -> None:
    run = train(recorder, 40)
    (finding,) = evaluated(run, "loss_scale")
    assert finding.severity is Severity.ERROR
    assert finding.subject.step == 40
    assert not evaluated(run, "non_finite")  # one cause, one finding
    assert not evaluated(train(recorder, None), "loss_scale")
