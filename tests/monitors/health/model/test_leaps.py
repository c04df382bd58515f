"""Leaps found one value at a time are those that the rule finds in the whole run."""

from __future__ import annotations

import numpy as np
import pytest

from backlight.monitors.health.model.history import LeapLimits, LiveLeaps, live_limits
from backlight.monitors.health.rules.spike import SpikeLimits, leaps

STEPS = 300


def series(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return norms, losses and addends with leaps, values that are not finite, and steps of more work."""
    draws = np.random.default_rng(seed)
    norm, loss = draws.lognormal(0, 0.15, STEPS), 2 * draws.lognormal(0, 0.02, STEPS)
    addends = draws.integers(40, 60, STEPS).astype(float)
    norm[[10, 120, 200]] *= 30, 12, 30
    loss[[150, 201]] *= 3
    norm[90:100], loss[160] = np.inf, np.nan
    for values in (norm, loss, addends):
        values[250] *= 20  # a step of 20 times the work
    return norm, loss, addends


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", [{}, {"spike_norm_ratio": 20.0}, {"spike_window": 40}])
def test_live_leaps_are_those_of_the_rule(seed: int, changes: dict[str, float]) -> None:
    limits = SpikeLimits().override(changes)
    norm, loss, addends = series(seed)
    live = LiveLeaps(live_limits({"health": changes}))
    found = [
        live.add(*values, {"addends": count, "forwards": 1.0})
        for *values, count in zip(norm, loss, addends, strict=True)
    ]
    steps = np.arange(STEPS)
    for name, values, ratio in (
        ("norm", norm, limits.spike_norm_ratio),
        ("loss", loss, limits.spike_loss_ratio),
    ):
        rule = leaps(name, "1", steps, values, ratio, limits, work=addends)
        at = [step for step in steps if name in found[step]]
        assert at == list(np.flatnonzero(rule.outliers))
        np.testing.assert_allclose([found[step][name] for step in at], rule.medians[at])
    expected = {120, 200} if "spike_norm_ratio" not in changes else {200}
    assert {step for step in steps if "norm" in found[step]} == expected
    assert {step for step in steps if "loss" in found[step]} == {150, 201}


def test_history_below_zero_has_no_size_to_leap_from() -> None:
    live = LiveLeaps(LeapLimits())
    for step in range(60):
        assert not live.add(1.0, (-1.0) ** step, {})
    assert live.add(100.0, 100.0, {}) == {"norm": 1.0}
