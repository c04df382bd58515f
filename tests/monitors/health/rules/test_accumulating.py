from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from backlight.records import Severity

RATES = {"SGD": 1e-2, "Adam": 1e-3, "AdamW": 1e-4}


def train(
    recorder: Any, optimizer_name: str, zero_every: int | None, *, batch: int = 32, warm: int = 1
) -> Any:
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=RATES[optimizer_name])
    x, weight = torch.randn(512, 20), torch.randn(20, 5)
    y = (x @ weight).argmax(1)

    def loss_of(step: int) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = RATES[optimizer_name] * min(1.0, (step + 1) / warm)
        chosen = torch.randint(0, 512, (batch,))
        return functional.cross_entropy(model(x[chosen]), y[chosen])

    return recorder(model, optimizer).fit(optimizer, 40, loss_of, zero_every=zero_every)


@pytest.mark.parametrize("optimizer", sorted(RATES))
def test_missing_zero_grad_is_found_and_its_control_is_not(
    recorder: Any, evaluated: Any, optimizer: str
) -> None:
    (finding,) = evaluated(train(recorder, optimizer, None), "accumulating")
    assert finding.severity is Severity.ERROR
    assert finding.subject.step == 0
    assert finding.evidence[0].path == "scalars/total_norm"
    assert not evaluated(train(recorder, optimizer, 1), "accumulating")
    assert not evaluated(train(recorder, optimizer, 1, warm=40), "accumulating")


def test_zero_grad_once_per_epoch_is_found(recorder: Any, evaluated: Any) -> None:
    assert evaluated(train(recorder, "SGD", 16), "accumulating")


def growing(power: float, steps: int = 30, noise: float = 0.02) -> np.ndarray:
    random = np.random.default_rng(0)
    return 1e-2 * np.arange(1, steps + 1) ** power * random.lognormal(0, noise, steps)


def test_other_growth_has_no_finding(synthetic: Any, evaluated: Any) -> None:
    assert evaluated(synthetic({"a": growing(1.0), "b": growing(0.6)}), "accumulating")
    for rms, scalars in (
        ({"a": growing(1.0), "b": growing(1.0)}, {"backwards": np.arange(1, 31)}),
        ({"a": growing(2.0)}, {}),
        ({"a": growing(0.2)}, {}),
        ({"a": growing(1.0, noise=0.5)}, {}),
        ({"a": growing(1.0, steps=11)}, {}),
        ({"a": growing(1.0)} | {f"w{i}": [1e-4] * 30 for i in range(3)}, {}),
    ):
        assert not evaluated(synthetic(rms, scalars=scalars), "accumulating")


def test_unrecorded_steps_count(synthetic: Any, evaluated: Any) -> None:
    steps = np.arange(0, 300, 10)
    rms = {"a": 1e-2 * (steps + 1.0)}
    (finding,) = evaluated(synthetic(rms, steps=steps), "accumulating")
    assert finding.subject.step == 0
