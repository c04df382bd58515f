from typing import Any

import pytest
import torch
from torch import nn

from backlight.records import Severity


def rms(steps: int = 30) -> dict[str, list[float]]:
    return {name: [1e-2] * steps for name in ("first", "middle", "last", "head")}


def test_first_step_and_parameter_closest_to_the_loss(synthetic: Any, evaluated: Any) -> None:
    bad = {("first", 12): 64, ("middle", 12): 2, ("last", 20): 1}
    run = synthetic(rms(), nan=bad, scalars={"loss": [2.0] * 30})
    (finding,) = evaluated(run, "non_finite")
    assert finding.severity is Severity.ERROR
    assert (finding.subject.parameter, finding.subject.step) == ("middle", 12)
    assert [(e.path, e.value) for e in finding.evidence[:3]] == [
        ("series/gradient/nan/middle", 2),
        ("series/gradient/inf/middle", 0),
        ("series/gradient/non_finite/first", 64),
    ]


def test_skipped_steps_do_not_count(synthetic: Any, evaluated: Any) -> None:
    skipped = {"scaler/skipped": {4: 1.0, 5: 0.0, 9: 1.0}}
    bad = {("first", 4): 1, ("head", 9): 1}
    assert not evaluated(synthetic(rms(), nan=bad, scalars=skipped), "non_finite")
    (finding,) = evaluated(synthetic(rms(), nan=bad | {("head", 5): 1}, scalars=skipped), "non_finite")
    assert finding.subject.step == 5


def test_non_finite_loss_is_found(synthetic: Any, evaluated: Any) -> None:
    run = synthetic(rms(), scalars={"loss": [1.0] * 20 + [float("inf")] * 10})
    (finding,) = evaluated(run, "non_finite")
    assert finding.subject.step == 20
    assert finding.subject.parameter is None
    assert finding.evidence[0].value == "inf"
    assert not evaluated(synthetic(rms(), scalars={"loss": [1.0] * 30}), "non_finite")
    assert not evaluated(synthetic({}), "non_finite")


class Distance(nn.Module):
    """Square root of a sum of squares: at zero its value is finite and its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(4, 4, bias=False), nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.above(self.below(x).square().sum(1, keepdim=True).sqrt())


def train(recorder: Any, poisoned: int | None) -> Any:
    model = Distance()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(8, 4)
        if step == poisoned:
            x[3] = 0.0
        return (model(x) - 1).square().mean()

    return recorder(model, optimizer).fit(optimizer, 30, loss_of)


@pytest.mark.slow
def test_square_root_at_zero_is_found_below_the_finite_layer(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder, 11), "non_finite")
    assert (finding.subject.parameter, finding.subject.step) == ("below.weight", 11)
    assert not evaluated(train(recorder, None), "non_finite")
