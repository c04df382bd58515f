from typing import Any

import numpy as np
import pytest
import torch

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.health.model.score import health_series
from backlight.records import Severity
from run_builder import parameter


def noise(steps: int, seed: int = 0) -> np.ndarray:
    return 1e-2 * np.random.default_rng(seed).lognormal(0, 0.3, steps)


def test_injected_growth_is_found_with_its_first_step(synthetic: Any, evaluated: Any) -> None:
    rms = {f"w{i}": noise(80, i) for i in range(6)}
    rms["w2"][60:] *= 1e5 * 1.2 ** np.arange(20)
    rms["w4"][62:] *= 1e4
    (finding,) = evaluated(synthetic(rms), "exploding")
    assert finding.severity is Severity.WARNING
    assert finding.subject.parameter == "w2"
    assert finding.subject.step == 60
    assert finding.evidence[0].step == int(np.argmax(rms["w2"]))


@pytest.mark.slow
def test_severity_of_a_part_of_the_run_holds_for_the_whole(synthetic: Any, evaluated: Any) -> None:
    """What is an error while the run goes on is one at its end, whatever follows."""

    def severities(rms: np.ndarray) -> list[Severity]:
        found = [evaluated(synthetic({"a": rms[:end], "b": noise(end, 1)}), "exploding") for end in lengths]
        return [finding.severity for (finding,) in filter(None, found)]

    lengths = range(44, 96, 3)
    short, lasting, broken = noise(100), noise(100), noise(100)
    short[40:50] *= 1e5
    lasting[40:] *= 1e5
    broken[40:60] *= 1e5
    broken[60:] = np.inf
    assert set(severities(short)) == set(severities(lasting)) == {Severity.WARNING}
    assert severities(broken) == [Severity.WARNING] * 6 + [Severity.ERROR] * 12


def test_recovered_explosion_is_a_warning(synthetic: Any, evaluated: Any) -> None:
    rms = {"a": noise(80), "b": noise(80, 1)}
    rms["a"][40:44] *= 1e5
    (finding,) = evaluated(synthetic(rms), "exploding")
    assert finding.severity is Severity.WARNING


def test_single_jump_is_left_to_spike_unless_nan_follows(synthetic: Any, evaluated: Any) -> None:
    rms = {"a": noise(80), "b": noise(80, 1)}
    rms["a"][50] *= 1e6
    assert not evaluated(synthetic(rms), "exploding")
    (finding,) = evaluated(synthetic(rms, nan={("a", 51): 3}), "exploding")
    assert finding.subject.step == 50


def eval_mode(before: float, after: float, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return series of a parameter that changes at step 30, such as the bias before a batch norm."""
    rms = {
        "x": np.where(np.arange(80) < 30, before, after) * noise(80) / 1e-2,
        "b": noise(80, 1),
        "c": noise(80, 2),
    }
    return {"rms": rms, "records": {"x": parameter("x", shape)}}


@pytest.mark.slow
def test_ratio_to_rounding_noise_is_no_explosion(synthetic: Any, evaluated: Any) -> None:
    # 3.5e-9 next to gradients of 1e-2 is the rounding error of a sum that is zero, until it no longer is.
    run = synthetic(**eval_mode(3.5e-9, 1e-2, (8, 8)))
    assert not evaluated(run, "exploding")
    assert not health_series(run).exploding.any()
    (finding,) = evaluated(synthetic(**eval_mode(1e-6, 1e-2, (8, 8))), "exploding")
    assert (finding.severity, finding.subject.step) == (Severity.WARNING, 30)
    assert finding.detail.endswith("and stays there up to the last finite step.")


def test_exploding_vector_alone_is_a_hint(synthetic: Any, evaluated: Any) -> None:
    # Under autocast the same rounding error is a larger share of the other gradients.
    (finding,) = evaluated(synthetic(**eval_mode(1e-6, 1e-2, (8,))), "exploding")
    assert finding.is_hint


@pytest.mark.slow
def test_huge_norm_is_found_without_a_past(synthetic: Any, evaluated: Any) -> None:
    (finding,) = evaluated(synthetic({"a": noise(80) * 1e11, "b": noise(80, 1)}), "exploding")
    assert finding.severity is Severity.WARNING
    assert finding.title.startswith("The total gradient norm is ")
    early = noise(80) * np.where(np.arange(80) < 30, 1e11, 1.0)
    for sound in (noise(80) * 1e6, early):
        assert not evaluated(synthetic({"a": sound, "b": noise(80, 1)}), "exploding")


@pytest.mark.slow
def test_healthy_series_have_no_finding(synthetic: Any, evaluated: Any) -> None:
    steps = np.arange(400)
    rms = {
        "noisy": noise(400),
        "slowly growing": noise(400) * np.exp(steps / 100),
        "zero, then non-zero": np.where(steps < 100, 0.0, 1e-2),
        "tiny, then less tiny": np.where(steps < 100, 1e-14, 5e-9),
        "steep start": noise(400) * (1 + 1e6 * np.exp(-steps / 2.0)),
        "rare": np.where(steps % 7 == 0, 1e-2, np.nan),
    }
    assert not evaluated(synthetic(rms), "exploding")


@pytest.mark.slow
def test_return_to_the_usual_size_is_no_explosion(synthetic: Any, evaluated: Any) -> None:
    # A policy that solves its task has hardly any gradient until it fails again.
    solved = {"actor": noise(500), "critic": noise(500, 1), "other": noise(500, 2)}
    for rms in solved.values():
        rms[60:400] *= 1e-6
        rms[400:] *= 0.3
    assert not evaluated(synthetic(solved), "exploding")
    solved["actor"][400:] *= 1e4
    (finding,) = evaluated(synthetic(solved), "exploding")
    assert finding.subject.parameter == "actor"


@pytest.mark.slow
def test_more_terms_explain_growth(synthetic: Any, evaluated: Any) -> None:
    # An agent that fails at once learns from 8 steps an episode, and from 400 once it balances.
    episodes = np.where(np.arange(80) < 60, 8.0, 400.0)
    policy = {"a": noise(80) * episodes, "b": noise(80, 1)}
    policy["a"][:10] *= 3
    policy["a"][10:60] *= 1e-3  # nearly solved
    assert evaluated(synthetic(policy), "exploding")
    assert not evaluated(synthetic(policy, scalars={"forwards": episodes}), "exploding")
    policy["a"][62:] *= 1e3
    (finding,) = evaluated(synthetic(policy, scalars={"forwards": episodes}), "exploding")
    assert (finding.subject.parameter, finding.subject.step) == ("a", 62)


@pytest.mark.slow
def test_clip_norm_counts_only_with_growth(synthetic: Any, evaluated: Any) -> None:
    rms = {"a": noise(80), "b": noise(80, 1)}
    clip = {"clip/norm": [0.1] * 80, "clip/limit": [1e-3] * 80}
    assert not evaluated(synthetic(rms, scalars=clip), "exploding")  # clipped low from the start
    rms["a"][60:66] *= 100
    (finding,) = evaluated(synthetic(rms, scalars=clip), "exploding")
    assert finding.subject.parameter is None
    assert finding.subject.step == 60
    assert not evaluated(synthetic(rms), "exploding")  # 100 times its past alone is no explosion
    by_value = {"clip/limit": [1e-3] * 80}  # a limit of values is not a clip norm
    assert not evaluated(synthetic(rms, scalars=by_value), "exploding")


def diverge(recorder: Any, rate: float) -> Any:
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x = torch.randn(256, 10)
    return recorder(model, optimizer).fit(
        optimizer, 60, lambda _: (model(x) - x.sum(1, keepdim=True)).square().mean()
    )


@pytest.mark.slow
def test_unstable_rate_is_found_and_its_control_is_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(diverge(recorder, 1.5), "exploding")
    assert finding.severity is Severity.ERROR
    assert not evaluate_rules(diverge(recorder, 0.1))


@pytest.mark.slow
def test_rounding_error_does_not_explode(synthetic: Any, evaluated: Any) -> None:
    noise = [1e-10] * 40 + [2e-7] * 40  # a bias before a batch norm, after a change of the kernel
    assert not evaluated(synthetic({"bias": noise, "a": [1e-2] * 80, "b": [1e-2] * 80}), "exploding")
    assert evaluated(synthetic({"bias": noise, "a": [1e-6] * 80, "b": [1e-6] * 80}), "exploding")
