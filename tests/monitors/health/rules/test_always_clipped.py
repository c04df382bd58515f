from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backlight.records import Fingerprint, Severity
from run_builder import build_health_run


def clipped(factor: np.ndarray) -> dict[str, Any]:
    return {"clip/factor": factor, "clip/norm": 1.0 / factor, "clip/limit": np.ones(len(factor))}


def test_severity_depends_on_the_clip_factor(synthetic: Any, evaluated: Any) -> None:
    rms = {"a": [1e-2] * 100}
    (hard,) = evaluated(synthetic(rms, scalars=clipped(np.full(100, 0.02))), "always_clipped")
    assert hard.severity is Severity.WARNING
    assert [e.path for e in hard.evidence] == [
        "scalars/clip/factor",
        "scalars/clip/norm",
        "scalars/clip/limit",
    ]
    (mild,) = evaluated(synthetic(rms, scalars=clipped(np.full(100, 0.6))), "always_clipped")
    assert mild.severity is Severity.INFO


def test_hard_clipping_is_info_where_the_optimizer_divides_by_the_gradient(
    evaluated: Any, tmp_path: Path
) -> None:
    for optimizers, severity in ((("RAdam",), Severity.INFO), (("Adam", "SGD"), Severity.WARNING)):
        run = build_health_run(
            tmp_path / optimizers[-1], {"a": [1e-2] * 100}, scalars=clipped(np.full(100, 0.02)),
            fingerprint=Fingerprint(optimizers=optimizers),
        )  # fmt: skip
        (finding,) = evaluated(run, "always_clipped")
        assert finding.severity is severity


SAMPLED = [*range(64), *range(64, 4096, 32)]


@pytest.mark.slow
def test_share_and_first_part_count_steps(synthetic: Any, evaluated: Any) -> None:
    """Most recorded steps are early ones: they are a small part of the run."""

    def run(is_clipped: Any) -> Any:
        factor = [0.01 if is_clipped(step) else 1.0 for step in SAMPLED]
        rms = {"a": [1e-2] * len(SAMPLED)}
        return synthetic(rms, steps=SAMPLED, scalars=clipped(np.array(factor)))

    (finding,) = evaluated(run(lambda step: step > 500), "always_clipped")
    assert finding.title == "Clipping is active at 100 % of the steps"
    assert finding.subject.step == 832  # a fifth of the run
    assert not evaluated(run(lambda step: step < 500), "always_clipped")
    assert not evaluated(run(lambda step: step % 64 == 0), "always_clipped")


def test_norm_of_every_step_is_compared_with_the_last_clip_norm(synthetic: Any, evaluated: Any) -> None:
    """The script's norm is known at every step, factor and limit at the recorded ones."""

    def run(norm: Any) -> Any:
        recorded = dict.fromkeys(range(0, 300, 50), 1.0)
        scalars = {
            "clip/norm": {step: norm(step) for step in range(300)},
            "clip/factor": {step: min(1.0, 1.0 / norm(step)) for step in recorded},
            "clip/limit": recorded,
        }
        return synthetic({"a": [1e-2] * 300}, scalars=scalars)

    (finding,) = evaluated(run(lambda _: 50.0), "always_clipped")
    assert finding.severity is Severity.WARNING
    assert "(240 recorded steps)" in finding.detail
    assert not evaluated(run(lambda step: 0.5 if step % 50 else 50.0), "always_clipped")


@pytest.mark.slow
def test_effect_is_that_of_the_optimizer(evaluated: Any, tmp_path: Path) -> None:
    for optimizers, words in (
        (("AdamW",), "AdamW divides by the size of the gradients"),
        (("Adam", "RMSprop"), "Adam, RMSprop divide by the size"),
        (("SGD",), "acts as part of the learning rate"),
        (("Adam", "SGD"), "acts as part of the learning rate"),
    ):
        run = build_health_run(
            tmp_path / "-".join(optimizers), {"a": [1e-2] * 100}, scalars=clipped(np.full(100, 0.5)),
            fingerprint=Fingerprint(optimizers=optimizers),
        )  # fmt: skip
        (finding,) = evaluated(run, "always_clipped")
        assert words in finding.detail
        assert finding.is_hint


@pytest.mark.slow
def test_healthy_clipping_has_no_finding(synthetic: Any, evaluated: Any) -> None:
    rms = {"a": [1e-2] * 100}
    half = np.where(np.arange(100) % 2, 0.5, 1.0)
    early = np.where(np.arange(100) < 30, 0.01, 1.0)
    for factor in (half, early, np.ones(100), np.full(60, 0.01)):  # the last: 48 settled steps
        run = synthetic({"a": rms["a"][: len(factor)]}, scalars=clipped(factor))
        assert not evaluated(run, "always_clipped")
    assert not evaluated(synthetic(rms), "always_clipped")


def train(recorder: Any, limit: float) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(_step: int) -> torch.Tensor:
        x = torch.randn(16, 8)
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    return recorder(model, optimizer).fit(optimizer, 80, loss_of, clip=limit)


@pytest.mark.slow
def test_low_limit_is_found_and_its_control_is_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder, 1e-3), "always_clipped")
    assert finding.severity is Severity.WARNING
    assert not evaluated(train(recorder, 30.0), "always_clipped")
