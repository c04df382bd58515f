import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.records import Severity
from run_builder import parameter


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def train(
    recorder: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rate: Callable[[int], float] | None = None,
    steps: int = 30,
) -> Any:
    dtype = next(model.parameters()).dtype

    def loss_of(step: int) -> torch.Tensor:
        if rate is not None:
            optimizer.param_groups[-1]["lr"] = rate(step)
        x = torch.randn(32, 6).to(dtype)
        return functional.cross_entropy(model(x), x[:, :3].argmax(1))

    return recorder(model, optimizer).fit(optimizer, steps, loss_of)


@pytest.mark.parametrize(("rate", "dtype"), [(0.0, torch.float32), (1e-6, torch.bfloat16)])
def test_rate_of_zero_or_below_resolution_is_found(
    recorder: Any, evaluated: Any, rate: float, dtype: torch.dtype
) -> None:
    model = build().to(dtype)
    run = train(recorder, model, torch.optim.SGD(model.parameters(), lr=rate))
    (finding,) = evaluated(run, "no_update")
    assert finding.severity is Severity.ERROR
    assert (finding.evidence[-1].path, finding.evidence[-1].value) == ("scalars/lr/0/0", rate)


@pytest.mark.slow
def test_one_group_at_zero_is_a_warning(recorder: Any, evaluated: Any) -> None:
    model = build()
    groups = [{"params": model[2].parameters(), "lr": 0.1}, {"params": model[0].parameters(), "lr": 0.1}]
    run = train(recorder, model, torch.optim.SGD(groups), lambda step: 0.1 * (step < 12))
    (finding,) = evaluated(run, "no_update")
    assert finding.severity is Severity.WARNING
    assert finding.subject.parameter == "0.weight"


def test_optimizer_with_stale_tensors_is_found(recorder: Any, evaluated: Any) -> None:
    model = build()
    held = copy.deepcopy(model[0])
    optimizer = torch.optim.SGD([*held.parameters(), *model[2].parameters()], lr=0.1)
    (finding,) = evaluated(train(recorder, model, optimizer), "no_update")
    assert finding.severity is Severity.WARNING
    assert finding.subject.parameter == "0.weight"


@pytest.mark.slow
def test_healthy_runs_have_no_finding(recorder: Any, evaluated: Any) -> None:
    model = build()
    warm = train(recorder, model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1e-3 * step)
    assert not evaluated(warm, "no_update")
    ends = train(recorder, model, torch.optim.AdamW(model.parameters()), lambda step: 1e-3 * (1 - step / 29))
    assert not evaluated(ends, "no_update")  # the last step of a decay has the rate 0
    short = train(recorder, model, torch.optim.SGD(model.parameters(), lr=0.0), steps=9)
    assert not evaluated(short, "no_update")


@pytest.mark.slow
def test_zero_gradient_and_skipped_steps_do_not_count(synthetic: Any, evaluated: Any) -> None:
    still = {"a": [0.0] * 30, "b": [1e-3] * 30}
    zero = synthetic({"a": [0.0] * 30, "b": [1e-3] * 30}, update=still)
    assert not evaluated(zero, "no_update")
    rms = {"a": [1e-3] * 30, "b": [1e-3] * 30}
    assert evaluated(synthetic(rms, update=still), "no_update")
    sparse = {"a": [0.95] * 30, "b": [0.95] * 30}
    assert evaluated(synthetic(rms, update=still, zeros=sparse), "no_update")
    assert not evaluated(synthetic(rms, update=still, zeros=sparse, sampled=8), "no_update")
    skipped = {"scaler/skipped": [1.0] * 25 + [0.0] * 5}
    assert not evaluated(synthetic(rms, update=still, scalars=skipped), "no_update")


@pytest.mark.slow
def test_update_below_fp32_resolution_is_no_evidence(synthetic: Any, evaluated: Any) -> None:
    """The gradient of a bias before a batch norm is rounding error; its update is below the spacing."""
    noise = {"conv.bias": [2e-8] * 30, "conv.weight": [1e-2] * 30}
    still = {"conv.bias": [0.0] * 30, "conv.weight": [1e-3] * 30}
    rate = {"lr/0/0": [0.1] * 30}
    assert not evaluated(synthetic(noise, update=still, weight=8.0, scalars=rate), "no_update")
    # fp32 can represent this update: something stops the weight.
    large = noise | {"conv.bias": [1e-5] * 30}
    (finding,) = evaluated(synthetic(large, update=still, weight=8.0, scalars=rate), "no_update")
    assert (finding.severity, finding.subject.parameter) == (Severity.WARNING, "conv.bias")
    # No weight changes: the rate is too small for all of them.
    none = {name: [0.0] * 30 for name in noise}
    (finding,) = evaluated(
        synthetic(noise, update=none, weight=8.0, scalars={"lr/0/0": [1e-9] * 30}), "no_update"
    )
    assert finding.severity is Severity.ERROR
    assert finding.fix.startswith("Raise the learning rate")
    (finding,) = evaluated(
        synthetic(noise, update=none, weight=8.0, scalars={"lr/0/0": [0.1] * 30}), "no_update"
    )
    assert not finding.fix.startswith("Raise the learning rate")


def test_zero_rate_is_found_for_small_gradients(synthetic: Any, evaluated: Any) -> None:
    rms = {"a": [2e-8] * 30, "b": [1e-2] * 30}
    still = {"a": [0.0] * 30, "b": [1e-3] * 30}
    records = {"a": parameter("a"), "b": parameter("b", group="0/1")}
    rates = {"lr/0/0": [0.0] * 30, "lr/0/1": [0.1] * 30}
    (finding,) = evaluated(synthetic(rms, update=still, records=records, scalars=rates), "no_update")
    assert finding.subject.parameter == "a"


def test_replaced_module_is_one_finding(synthetic: Any, evaluated: Any) -> None:
    stale = [parameter(f"optimizer0.group0.parameter{i}", module="", module_type="") for i in (1, 2)]
    records = {"a": parameter("a"), "head": parameter("head", group="")}
    run = synthetic({"a": [1e-2] * 6, "head": [1e-2] * 6}, records=records, extra=stale)
    assert not evaluated(run, "no_gradient")
    (finding,) = evaluated(run, "no_update")
    assert (finding.severity, finding.subject.parameter) == (Severity.WARNING, "head")
    paths = {e.path for e in finding.evidence}
    assert {"parameters/group/head", f"parameters/group/{stale[0].name}"} <= paths
    assert {f"series/gradient/measured/{p.name}" for p in stale} <= paths


@pytest.mark.slow
def test_rates_that_are_too_small_and_rates_of_zero_are_each_one_finding(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(24)))
    rates = [1e-12] * 22 + [0.0, 0.1]
    groups = [{"params": one.parameters(), "lr": rate} for one, rate in zip(model, rates, strict=True)]
    optimizer = torch.optim.Adam(groups)
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
        for _ in range(40):
            optimizer.zero_grad()
            x = torch.randn(4, 8)
            sum(one(x).square().sum() for one in model).backward()
            optimizer.step()
    found = {one.rule: one for one in evaluate_rules(backlight.open_run(tmp_path / "run"))}
    assert set(found) >= {"no_update", "weights_unchanged"}
    assert found["no_update"].subject.parameter in {"22.weight", "22.bias"}
    assert "23" not in found["no_update"].title
    assert len([e for e in found["no_update"].evidence if e.path.startswith("series/update")]) == 2


def slow(synthetic: Any, ratio: Any, loss: Any = 0.7, rate: Any = 1e-9) -> Any:
    names = ("a", "b", "c")
    steps = np.arange(60)
    return synthetic(
        {name: [1e-3] * 60 for name in names},
        update={name: ratio + 0 * steps for name in names},
        scalars={"loss": loss + 0 * steps, "lr/0/0": rate + 0 * steps},
    )


@pytest.mark.slow
def test_rate_that_is_too_low_all_run_is_named(synthetic: Any, evaluated: Any) -> None:
    (finding,) = evaluated(slow(synthetic, 2e-8), "no_update")
    assert finding.title == "The learning rate of 1e-9 is too low to change the weights"
    assert (finding.severity, finding.subject.step) == (Severity.WARNING, 0)
    assert [e.path for e in finding.evidence] == ["series/update/ratio/a", "scalars/lr/0/0"]
    # A warm-up that never ends, and its peak.
    rising = 1e-9 * np.arange(60) / 60
    (warming,) = evaluated(slow(synthetic, 20 * rising, rate=rising), "no_update")
    assert warming.title == "The learning rate of 9.83e-10 is too low to change the weights"


@pytest.mark.slow
def test_small_updates_of_sound_runs_are_silent(synthetic: Any, evaluated: Any) -> None:
    steps = np.arange(60)
    falls = slow(synthetic, 2e-8, loss=np.linspace(0.7, 0.3, 60))
    fine_tuned = slow(synthetic, 2e-5, rate=1e-6)
    warmed_up = slow(synthetic, np.where(steps < 50, 1e-8, 1e-3))
    decayed = slow(synthetic, np.where(steps > 5, 1e-8, 1e-3))
    for run in (falls, fine_tuned, warmed_up, decayed):
        assert not evaluated(run, "no_update")
