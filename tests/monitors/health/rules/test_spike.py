from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from backlight.monitors.health.rules.spike import SpikeLimits, leaps
from backlight.records import Severity


def noise(steps: int = 200, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 0.15, steps)


def series_of(norm: np.ndarray, **scalars: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return {"a": norm / 8, "b": np.full(len(norm), 1e-4)}, {"total_norm": norm, **scalars}


def test_injected_spike_is_one_finding(synthetic: Any, evaluated: Any) -> None:
    norm, loss = noise(), 2 + 0.05 * noise(seed=1)
    norm[120] *= 20
    loss[120] = 4.0
    rms, scalars = series_of(norm, loss=loss, batch={120: 17.0})
    (finding,) = evaluated(synthetic(rms, scalars=scalars), "spike")
    assert finding.severity is Severity.WARNING
    assert finding.subject.step == 120
    assert finding.subject.parameter == "a"
    assert [e.path for e in finding.evidence] == [
        "scalars/total_norm",
        "scalars/loss",
        "scalars/batch",
        "series/gradient/rms/a",
        "series/gradient/rms/b",
    ]


def test_adjacent_steps_are_one_spike(synthetic: Any, evaluated: Any) -> None:
    norm = noise()
    norm[[100, 101, 104]] *= [20, 30, 15]
    norm[160] *= 50
    rms, scalars = series_of(norm)
    first, second = evaluated(synthetic(rms, scalars=scalars), "spike")
    assert (first.subject.step, second.subject.step) == (101, 160)


def test_only_the_largest_spikes_are_reported(synthetic: Any, evaluated: Any) -> None:
    norm = noise(600)
    norm[100:580:40] *= np.geomspace(20, 2000, 12)
    rms, scalars = series_of(norm)
    found = evaluated(synthetic(rms, scalars=scalars), "spike")
    assert [f.subject.step for f in found] == [380, 420, 460, 500, 540]


def test_small_spike_of_the_norm_alone_is_info(synthetic: Any, evaluated: Any) -> None:
    norm = noise()
    norm[120] = 7.0
    rms, scalars = series_of(norm, loss=2 + 0.05 * noise(seed=1))
    (finding,) = evaluated(synthetic(rms, scalars=scalars), "spike")
    assert finding.severity is Severity.INFO


@pytest.mark.slow
def test_non_finite_values_are_neither_history_nor_spike(synthetic: Any, evaluated: Any) -> None:
    norm = noise()
    norm[60:90] = np.inf
    norm[100] = np.nan
    assert not evaluated(synthetic({"a": noise()}, scalars={"total_norm": norm}), "spike")
    norm[120] = 40.0
    (finding,) = evaluated(synthetic({"a": noise()}, scalars={"total_norm": norm}), "spike")
    assert finding.subject.step == 120


@pytest.mark.slow
def test_healthy_series_have_no_finding(synthetic: Any, evaluated: Any) -> None:
    steps = np.arange(300)
    for norm, loss in (
        (noise(300), 2 + 0.05 * noise(300, 1)),
        (noise(300) * np.exp(-steps / 20) + 0.1, 10 * np.exp(-steps / 40) + 1),  # steep start
        (np.exp(steps / 100), np.exp(-steps / 30.0)),  # smooth: the MAD is small
        (np.where(steps < 150, 1.0, 1.01), np.where(steps < 150, 1.0, 1.2)),  # constant with a step
        (np.random.default_rng(0).lognormal(0, 0.6, 300), np.random.default_rng(1).normal(0, 1, 300)),
    ):
        rms, scalars = series_of(norm, loss=loss)
        assert not evaluated(synthetic(rms, scalars=scalars), "spike")
    early = noise(29)
    early[25] = 100
    assert not evaluated(synthetic({"a": early}, scalars={"total_norm": early}), "spike")


def test_history_is_causal() -> None:
    values = noise(500)
    limits = SpikeLimits()
    steps = np.arange(500)
    whole = leaps("x", "1", steps, values, 5.0, limits)
    for stop in (70, 300):
        part = leaps("x", "1", steps[:stop], values[:stop], 5.0, limits)
        np.testing.assert_array_equal(part.medians, whole.medians[:stop])
    expected = np.exp(np.median(np.log(values[300 - limits.spike_window : 300])))
    np.testing.assert_allclose(whole.medians[300], expected)


def train(recorder: Any, damaged: int | None) -> Any:
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    rec = recorder(model, optimizer)
    weight = torch.randn(12, 1)
    for step in range(120):
        x = torch.randn(32, 12)
        y = x @ weight + 0.3 * torch.randn(32, 1)
        if step == damaged:
            x[5] *= 100
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        rec.advance(loss.detach(), optimizer, clip=5.0, batch=float(step))
    return rec.close()


@pytest.mark.slow
def test_damaged_sample_is_found_and_its_control_is_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder, 80), "spike")
    assert finding.subject.step == 80
    assert finding.severity is Severity.WARNING
    assert not evaluated(train(recorder, None), "spike")


@pytest.mark.slow
def test_models_that_train_in_turn_have_histories_of_their_own(synthetic: Any, evaluated: Any) -> None:
    # Of 200 recorded steps of a thinned cadence every tenth is one of the actor, whose loss is far higher.
    loss, actor = 0.1 * noise(), np.arange(200) % 10 == 9
    loss[actor] *= 40
    rms, scalars = series_of(noise(seed=1), loss=loss)
    assert evaluated(synthetic(rms, scalars=scalars), "spike")
    steps = np.arange(200)
    rates = {"lr/0/0": dict.fromkeys(steps[~actor], 1e-3), "lr/1/0": dict.fromkeys(steps[actor], 1e-3)}
    assert not evaluated(synthetic(rms, scalars=scalars | rates), "spike")
    loss[120] *= 40  # a step of the critic
    (finding,) = evaluated(synthetic(rms, scalars=scalars | rates), "spike")
    assert finding.subject.step == 120


@pytest.mark.slow
def test_next_layer_with_an_optimizer_of_its_own_is_no_spike(synthetic: Any, evaluated: Any) -> None:
    loss = 0.1 * noise(120) + np.tile(0.7 * np.exp(-np.arange(60) / 3), 2)
    rms, scalars = series_of(noise(120), loss=loss)
    assert evaluated(synthetic(rms, scalars=scalars), "spike")
    rates = {f"lr/{layer}/0": dict.fromkeys(range(60 * layer, 60 * layer + 60), 0.03) for layer in (0, 1)}
    assert not evaluated(synthetic(rms, scalars=scalars | rates), "spike")


@pytest.mark.slow
def test_more_terms_are_no_spike(synthetic: Any, evaluated: Any) -> None:
    terms = np.ones(200)
    terms[100:180:20] = 30
    norm, loss = noise() * terms, (2 + 0.05 * noise(seed=1)) * terms
    rms, scalars = series_of(norm, loss=loss)
    assert len(evaluated(synthetic(rms, scalars=scalars), "spike")) == 4
    for name in ("forwards", "addends"):
        assert not evaluated(synthetic(rms, scalars=scalars | {name: 8 * terms}), "spike")
    loss[140] *= 20
    (finding,) = evaluated(synthetic(rms, scalars=scalars | {"forwards": 8 * terms}), "spike")
    assert finding.subject.step == 140
    assert ("scalars/forwards", 240.0) in [(one.path, one.value) for one in finding.evidence]


@pytest.mark.slow
def test_loss_of_both_signs_leaps_with_the_norm(synthetic: Any, evaluated: Any) -> None:
    norm, loss = noise(), np.random.default_rng(1).normal(0, 1, 200)
    loss[120] = 200.0  # what a policy gradient adds up has no size: an unlikely action makes it large
    rms, scalars = series_of(norm, loss=loss)
    assert not evaluated(synthetic(rms, scalars=scalars), "spike")
    assert evaluated(synthetic(rms, scalars={**scalars, "loss": loss + 10}), "spike")
    norm[120] *= 40
    (finding,) = evaluated(synthetic(rms, scalars={**scalars, "total_norm": norm}), "spike")
    assert {"scalars/total_norm", "scalars/loss"} <= {one.path for one in finding.evidence}


@pytest.mark.slow
def test_advice_knows_that_the_script_clips(synthetic: Any, evaluated: Any) -> None:
    norm = noise()
    norm[120] *= 20
    rms, scalars = series_of(norm)
    (plain,) = evaluated(synthetic(rms, scalars=scalars), "spike")
    assert "or clip the gradient norm" in plain.fix
    (clipped,) = evaluated(synthetic(rms, scalars=scalars | {"clip/limit": [1.0] * 200}), "spike")
    assert "the clip norm (now 1)" in clipped.fix


def steep(seed: int, steps: int = 120) -> np.ndarray:
    """Return losses that fall by a factor of 400 while they scatter by a fifth."""
    scatter = np.exp(np.random.default_rng(seed).normal(0, 0.2, (2, steps)))
    return 14 * np.exp(-np.arange(steps) / 14) * scatter[0] + 0.03 * scatter[1]


def leaping(losses: np.ndarray) -> list[int]:
    limits = SpikeLimits()
    steps = np.arange(len(losses))
    return np.flatnonzero(
        leaps("loss", "loss", steps, losses, limits.spike_loss_ratio, limits).outliers
    ).tolist()


def test_a_leap_out_of_a_steep_fall_is_found() -> None:
    """Its fall makes the deviation of the last 64 values large, which hid a leap by a factor of 1,000."""
    for seed in range(20):
        losses = steep(seed)
        assert leaping(losses) == []
        losses[77] *= 1000
        assert leaping(losses) == [77]


def test_hard_samples_one_at_a_time_do_not_leap() -> None:
    """Of single samples, a loss is often a thousand times the median: that is how they scatter."""
    losses = np.exp(np.random.default_rng(0).normal(-6, 2.5, 20_000))
    assert leaping(losses) == []
