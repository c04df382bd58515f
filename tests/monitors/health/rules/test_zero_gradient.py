from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backlight
from backlight.findings.evaluate import evaluate_rules
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


class Branches(nn.Module):
    """Two layers with a function between them, perhaps with a factor of zero behind the last one."""

    def __init__(self, *, is_gated: bool) -> None:
        super().__init__()
        self.first, self.second, self.skip = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(8, 3)
        nn.init.constant_(self.first.bias, 0.0 if is_gated else -100.0)
        self.is_gated = is_gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) * (0 if self.is_gated else 1) + self.skip(x)


def mlp(bias: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    nn.init.constant_(model[0].bias, bias)
    return model


@pytest.mark.parametrize(
    ("model", "title"),
    [
        (mlp(-100.0), "All units of `1` (ReLU) are dead"),
        (mlp(0.0), ""),
        (Branches(is_gated=False), "The input of `second` is zero for every sample"),
        # Nothing comes back to its bias either: its input may be anything.
        (
            Branches(is_gated=True),
            "The gradients of `first.weight`, `second.weight` and 2 more are exactly zero",
        ),
    ],
)
@pytest.mark.parametrize("is_clipped", [False, True])
def test_the_layer_whose_input_is_zero_is_named(
    model: nn.Module, title: str, is_clipped: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with backlight.watch(model, optimizer, run=tmp_path / "run", monitors=("health",), every=1):
        for _ in range(40):
            optimizer.zero_grad()
            for _ in range(2):  # accumulated
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(torch.randn(16, 8))
                nn.functional.cross_entropy(output, torch.randint(0, 3, (16,))).backward()
            if is_clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    reports = evaluate_rules(backlight.open_run(tmp_path / "run"))
    titles = [finding.title for finding in reports if finding.rule == "no_gradient"]
    assert titles == ([title] if title else [])
