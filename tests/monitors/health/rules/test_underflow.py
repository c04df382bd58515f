from typing import Any

import pytest
import torch
from torch import nn

from backlight.records import ParameterRecord


def train(recorder: Any, *, dtype: torch.dtype = torch.float16, loss_factor: float = 1e-5) -> Any:
    """Weights in half precision without a loss scale."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_of(_step: int) -> torch.Tensor:
        x = torch.randn(16, 32)
        return (model(x.to(dtype)).float() - x[:, :8]).square().mean() * loss_factor

    return recorder(model, optimizer).fit(optimizer, 30, loss_of)


def test_small_fp16_gradients_are_found_and_controls_are_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder), "loss_scale")
    assert finding.subject.parameter in {"0.weight", "2.weight"}
    assert finding.evidence[0].path.startswith("series/gradient/zero_share/")
    for options in ({"loss_factor": 1.0}, {"dtype": torch.float32}, {"dtype": torch.bfloat16}):
        assert not evaluated(train(recorder, **options), "loss_scale")


def autocast(recorder: Any, scale: float) -> Any:
    """fp32 weights under autocast: the gradient is computed in fp16 and cast, so underflow gives zeros."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)

    def loss_of(_step: int) -> torch.Tensor:
        x = torch.randn(16, 32)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        return (out.float() - x[:, :8]).square().mean() * 1e-5

    return recorder(model, optimizer).fit(optimizer, 30, loss_of, scaler=scaler)


@pytest.mark.slow
def test_small_loss_scale_is_found_and_its_control_is_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(autocast(recorder, 1.0), "loss_scale")
    assert finding.evidence[-1].path == "scalars/scaler/scale"
    assert not evaluated(autocast(recorder, 2.0**16), "loss_scale")


@pytest.mark.slow
def test_other_zeros_have_no_finding(synthetic: Any, evaluated: Any) -> None:
    half = {
        name: ParameterRecord(name, (8, 8), "float16", "cpu", 64, module_type=kind)
        for name, kind in (("dead", "Linear"), ("rare", "Embedding"))
    }
    rms = {"dead": [1e-2] * 30, "rare": [1e-7] * 30}
    zeros = {"dead": [0.6] * 30, "rare": [0.9] * 30}
    assert not evaluated(synthetic(rms, records=half, zeros=zeros), "loss_scale")
    few = {"dead": [1e-7] * 30}
    assert not evaluated(synthetic(few, records=half, zeros={"dead": [0.05] * 30}), "loss_scale")
    assert evaluated(synthetic(few, records=half, zeros={"dead": [0.6] * 30}), "loss_scale")
    scaled = {"scaler/scale": [65536.0] * 30}
    assert not evaluated(
        synthetic(few, records=half, zeros={"dead": [0.6] * 30}, scalars=scaled), "loss_scale"
    )
