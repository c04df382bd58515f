from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backlight.records import ParameterRecord, Severity


def train(recorder: Any, rate: float, zero: bool = False, steps: int = 80) -> Any:
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    if zero:
        nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return recorder(model, optimizer).classify(optimizer, steps, batch=32, inputs=10, classes=4)


@pytest.mark.slow
def test_high_rate_is_found_and_its_controls_are_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder, 5.0), "large_update")
    assert finding.title == "The learning rate of 5 is too high: step 0 overwrote the weights"
    assert finding.severity is Severity.ERROR  # the loss ends above its start
    assert finding.subject.parameter in {"0.weight", "2.weight"}
    assert finding.subject.step == 0
    assert "series/update/ratio/" in {e.path[:20] for e in finding.evidence}
    for options in ({}, {"zero": True}, {"zero": True, "steps": 200}):
        assert not evaluated(train(recorder, 1e-3, **options), "large_update")


def test_weights_that_start_small_on_purpose_are_left_out(recorder: Any, evaluated: Any) -> None:
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=1e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = recorder(model, optimizer).classify(optimizer, 30, batch=32, inputs=10, classes=4)
    assert run.frame("update", "ratio").values[0].max() > 1
    assert not evaluated(run, "large_update")


@pytest.mark.slow
def test_only_lasting_large_updates_are_found(synthetic: Any, evaluated: Any) -> None:
    rms = {"a": [1e-3] * 80, "b": [1e-3] * 80}
    steps = np.arange(80)
    assert evaluated(synthetic(rms, update={"a": [0.2] * 80}), "large_update")
    for ratio in (
        1.0 / (steps + 1),
        np.where(steps % 5, 0.2, 0.01),
        np.full(80, 0.05),
        np.where(steps > 70, 0.5, 0.01),
    ):
        assert not evaluated(synthetic(rms, update={"a": ratio}), "large_update")
    short = {"a": [1e-3] * 49}
    assert not evaluated(synthetic(short, update={"a": [0.2] * 49}), "large_update")


@pytest.mark.slow
def test_zero_initialised_weights_have_a_longer_start(synthetic: Any, evaluated: Any) -> None:
    def grown(steps: int, start: float) -> Any:
        rms = {"a": [1e-3] * steps}
        return synthetic(rms, update={"a": [0.2] * steps}, weight=[start] + [1.0] * (steps - 1))

    assert evaluated(grown(80, 1e-2), "large_update")
    assert not evaluated(grown(80, 0.0), "large_update")
    assert evaluated(grown(160, 0.0), "large_update")


def test_vectors_are_ignored(synthetic: Any, evaluated: Any) -> None:
    bias = ParameterRecord("bias", (8,), "float32", "cpu", 8, group="0/0")
    run = synthetic({"bias": [1e-3] * 80}, records={"bias": bias}, update={"bias": [0.5] * 80})
    assert not evaluated(run, "large_update")


def warmed_up(synthetic: Any, peak: float, loss: tuple[float, float] = (0.7, 0.7)) -> Any:
    """Write weights that grow while a warm-up of ten steps raises the rate; Adam moves each by the rate."""
    rates = np.minimum(np.arange(80) / 10, 1.0) * peak
    norms = 1.0 + 0.3 * np.cumsum(rates) / 1e-2
    updates = 0.3 * rates / 1e-2 / norms
    losses = np.where(np.arange(80) < 5, loss[0], loss[1])
    names = ("a", "b", "c")
    return synthetic(
        {name: [1e-3] * 80 for name in names},
        update={name: updates for name in names},
        weight=norms,
        scalars={"lr/0/0": rates, "loss": losses},
    )


@pytest.mark.slow
def test_rate_that_a_warm_up_makes_too_high_is_named(synthetic: Any, evaluated: Any) -> None:
    (finding,) = evaluated(warmed_up(synthetic, 0.05), "large_update")
    assert finding.title.startswith("The learning rate of 0.05 is too high: weights grew ")
    assert (finding.severity, finding.subject.step) == (Severity.WARNING, 0)
    (broken,) = evaluated(warmed_up(synthetic, 0.05, (0.7, 4.0)), "large_update")
    assert broken.severity is Severity.ERROR
    assert "The loss rose from 0.7 to 4 (step 5) and ended at 4." in broken.detail
    for peak in (3e-3, 1e-3, 1e-6):
        assert not evaluated(warmed_up(synthetic, peak), "large_update")
    assert not evaluated(warmed_up(synthetic, 0.05, (0.7, 0.3)), "large_update")  # the weights had to grow


def test_ratio_to_a_weight_that_shrank_to_nothing_is_no_measurement(synthetic: Any, evaluated: Any) -> None:
    """Weight decay prunes ``a``: what is left of it is no size that a step could be compared with."""
    names = [f"w{i}" for i in range(4)]
    decay = np.maximum(10.0 ** -np.arange(80.0), 1e-12)

    def run(weights: dict[str, np.ndarray]) -> Any:
        updates = {name: [0.2 if name == "w0" else 1e-3] * 80 for name in names}
        return synthetic({name: [1e-3] * 80 for name in names}, update=updates, weights=weights)

    assert evaluated(run({}), "large_update")
    assert not evaluated(run({"w0": decay}), "large_update")
