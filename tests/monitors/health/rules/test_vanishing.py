from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backlight.records import ParameterRecord, Severity


def model_of(count: int, small: int, value: float = 1e-12, steps: int = 40) -> dict[str, list[float]]:
    return {f"layer{i}.weight": [value if i < small else 1e-3] * steps for i in range(count)}


def test_injected_small_gradients_are_one_finding(synthetic: Any, evaluated: Any) -> None:
    run = synthetic(model_of(12, 2) | {"layer0.weight": [1e-13] * 40})
    (finding,) = evaluated(run, "vanishing")
    assert finding.severity is Severity.WARNING
    assert finding.subject.parameter == "layer0.weight"
    assert finding.subject.step == 0
    assert finding.evidence[0].path == "series/gradient/rms/layer0.weight"
    assert np.isclose(finding.evidence[0].value, 1e-13)


def test_severity_depends_on_the_parameters(synthetic: Any, evaluated: Any) -> None:
    (quarter,) = evaluated(synthetic(model_of(12, 4)), "vanishing")
    assert quarter.severity is Severity.ERROR
    bias = ParameterRecord("layer0.bias", (8,), "float32", "cpu", 8, module="layer0", group="0/0")
    run = synthetic(model_of(10, 0) | {"layer0.bias": [1e-12] * 40}, records={"layer0.bias": bias})
    (vector,) = evaluated(run, "vanishing")
    assert vector.severity is Severity.INFO
    assert vector.title == "`layer0.bias` is redundant"
    assert "bias=False" in vector.fix


@pytest.mark.slow
def test_healthy_series_have_no_finding(synthetic: Any, evaluated: Any) -> None:
    for rms in (
        {f"w{i}": 1e-3 * 0.6 ** np.arange(40.0) for i in range(12)},  # converges
        model_of(12, 0) | {"layer0.weight": [1e-12] * 20 + [1e-4] * 20},  # recovered
        model_of(12, 0) | {"layer0.weight": [1e-12, 1e-4] * 20},  # intermittent
        model_of(12, 2, value=0.0),  # left to no_gradient
        model_of(12, 2, steps=19),
    ):
        assert not evaluated(synthetic(rms), "vanishing")
    assert evaluated(synthetic(model_of(12, 2, steps=20)), "vanishing")


@pytest.mark.slow
def test_gradients_that_are_small_everywhere_are_found(synthetic: Any, evaluated: Any) -> None:
    everywhere = model_of(12, 12)
    (finding,) = evaluated(synthetic(everywhere), "vanishing")
    assert finding.severity is Severity.WARNING
    assert finding.title == "All gradients are below 1e-10"
    slow, usual = ({name: [ratio] * 40 for name in everywhere} for ratio in (1e-9, 1e-4))
    assert evaluated(synthetic(everywhere, update=slow), "vanishing")
    assert not evaluated(synthetic(everywhere, update=usual), "vanishing")  # Adam with a small eps
    assert evaluated(synthetic(model_of(12, 12, steps=3)), "vanishing")  # a short run that has ended
    assert not evaluated(synthetic(model_of(12, 12, steps=2)), "vanishing")
    assert not evaluated(synthetic(model_of(12, 12, value=1e-9)), "vanishing")


def test_run_that_converges_early_is_sound(synthetic: Any, evaluated: Any) -> None:
    # Of the recorded steps most are early ones; of the steps nearly all have no gradient left.
    steps = [*range(64), *range(64, 4096, 64)]
    rms = {name: [1e-3 if step < 32 else 1e-13 for step in steps] for name in "abc"}
    assert not evaluated(synthetic(rms, steps=steps), "vanishing")


def train(recorder: Any, activation: Callable[[], nn.Module], scale: float) -> Any:
    """Train equal layers; each sigmoid shrinks the gradient at least fourfold."""
    layers: list[nn.Module] = []
    for _ in range(24):
        layers += [nn.Linear(16, 16), activation()]
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=scale / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return recorder(model, optimizer).classify(optimizer, 30, inputs=16)


@pytest.mark.slow
def test_deep_sigmoid_stack_is_found_and_its_control_is_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder, nn.Sigmoid, 1.0), "vanishing")
    assert finding.subject.parameter == "0.weight"
    assert finding.severity is not Severity.INFO
    assert not evaluated(train(recorder, nn.ReLU, 2**0.5), "vanishing")
