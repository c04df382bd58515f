from typing import Any

import numpy as np
import torch
from torch import nn

from backlight.records import ParameterRecord


def train(recorder: Any, rate: float, zero: bool = False, steps: int = 80) -> Any:
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    if zero:
        nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return recorder(model, optimizer).classify(optimizer, steps, batch=32, inputs=10, classes=4)


def test_high_rate_is_found_and_its_controls_are_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder, 5.0), "large_update")
    assert finding.subject.parameter in {"0.weight", "2.weight"}
    assert finding.subject.step == 0
    assert finding.evidence[0].path.startswith("series/update/ratio/")
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
