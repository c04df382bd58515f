from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backlight.records import ParameterRecord, Severity


def test_dead_parameter_is_found_with_its_first_step(synthetic: Any, evaluated: Any) -> None:
    run = synthetic({"a": [1e-2] * 60, "b": [1e-2] * 30 + [0.0] * 30, "c": [0.0] * 60})
    (finding,) = evaluated(run, "no_gradient")
    assert finding.severity is Severity.WARNING
    assert finding.subject.parameter == "b"  # equal sizes: model order
    assert finding.subject.step == 30
    assert finding.evidence[0].value == 64


def test_severity_depends_on_the_parameters(synthetic: Any, evaluated: Any) -> None:
    (everything,) = evaluated(synthetic({"a": [0.0] * 30, "b": [0.0] * 30}), "no_gradient")
    assert everything.severity is Severity.ERROR
    bias = ParameterRecord("conv.bias", (8,), "float32", "cpu", 8, module="conv", group="0/0")
    rms = {"conv.bias": [0.0] * 40, "conv.weight": [1e-3] * 40}
    (vector,) = evaluated(synthetic(rms, records={"conv.bias": bias}), "no_gradient")
    assert (vector.severity, vector.subject.parameter) == (Severity.INFO, "conv.bias")


@pytest.mark.slow
def test_fix_names_the_case(synthetic: Any, evaluated: Any) -> None:
    names = {"head.bias": (8,), "rnn.weight_hh_l0_reverse": (8, 8), "0.weight": (8, 8)}
    fixes = {}
    for name, shape in names.items():
        records = {name: ParameterRecord(name, shape, "float32", "cpu", int(np.prod(shape)), group="0/0")}
        run = synthetic({name: [0.0] * 40, "other.weight": [1e-3] * 40}, records=records)
        fixes[name] = evaluated(run, "no_gradient")[0].fix
    assert "cancels in a difference of outputs" in fixes["head.bias"]
    assert "bidirectional RNN at its last step" in fixes["rnn.weight_hh_l0_reverse"]
    assert "a ReLU that is never positive" in fixes["0.weight"]


def test_healthy_series_have_no_finding(synthetic: Any, evaluated: Any) -> None:
    rms = {
        "zero-initialised adapter": [0.0] * 2 + [1e-3] * 38,
        "recovered": [0.0] * 25 + [1e-3] * 15,
        "intermittent": [0.0, 1e-3] * 20,
        "short": [float("nan")] * 30 + [0.0] * 10,
        "small": [1e-30] * 40,
    }
    assert not evaluated(synthetic(rms), "no_gradient")
    assert not evaluated(synthetic({"a": [0.0] * 19, "b": [1e-3] * 19}), "no_gradient")


def train(recorder: Any, bias: float) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(model[0].bias, bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return recorder(model, optimizer).classify(optimizer, 40, inputs=8)


@pytest.mark.slow
def test_dead_units_are_found_and_their_control_is_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder, -100.0), "no_gradient")
    assert finding.subject.parameter == "0.weight"
    assert not evaluated(train(recorder, 0.0), "no_gradient")
