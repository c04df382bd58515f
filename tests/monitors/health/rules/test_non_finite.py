from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.records import Severity
from backlight.store.read.run import open_run


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


@pytest.mark.slow
@pytest.mark.parametrize(("poisoned", "names_branch"), [("branch", True), ("root", False)])
def test_branch_that_a_selection_leaves_out_is_named(
    tmp_path: Path, poisoned: str, *, names_branch: bool
) -> None:
    """The derivative of a root of 0 is infinite: in a branch that is left out, and in one that is used."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with backlight.watch(model, optimizer, run=tmp_path, monitors=("health", "correctness"), every=1):
        for step in range(12):
            hidden = model(torch.randn(8, 4))
            part = hidden * (hidden > 0) if step > 5 else hidden.abs() + 1.0
            root = torch.where(part > 0, part.sqrt(), 0.0) if poisoned == "branch" else part.sqrt()
            optimizer.zero_grad()
            root.square().mean().backward()
            optimizer.step()
    (finding,) = [f for f in evaluate_rules(open_run(tmp_path)) if f.rule == "non_finite"]
    assert finding.subject.step == 6
    assert ("`where` one of whose branches `sqrt` makes" in finding.detail) == names_branch
