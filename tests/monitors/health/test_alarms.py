"""Alarms about single steps follow the thresholds of the run, the work of a step, and its optimizers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backlight.monitor import StoredStep
from backlight.monitors.health.monitor import AlarmMonitor
from backlight.series import GRADIENT

STEPS = 60


def alarms(
    norms: Any, *, thresholds: dict[str, float] | None = None, losses: Any = None, **scalars: Any
) -> list[tuple[int, str]]:
    """Return the alarms about steps with these norms, losses and other scalars."""
    found: list[tuple[int, str]] = []
    monitor = AlarmMonitor()
    settings = SimpleNamespace(thresholds={"health": thresholds or {}})
    monitor.attach(SimpleNamespace(settings=settings, alarm=lambda *a: found.append(a)))  # type: ignore[arg-type]
    blob = np.zeros((1, len(GRADIENT.floats))), np.ones((1, len(GRADIENT.integers)), dtype=np.int64)
    blob[1][:, [GRADIENT.integers.index(name) for name in ("nan", "inf")]] = 0
    for step, norm in enumerate(norms):
        values = {name: float(of[step]) for name, of in scalars.items() if np.isfinite(of[step])}
        loss = 1.0 if losses is None else losses[step]
        monitor.on_step_stored(
            StoredStep(step, (), {"total_norm": norm, "loss": loss, **values}, {("gradient", 0): blob})
        )
    return found


def leaping(times: float) -> np.ndarray:
    values = np.random.default_rng(0).lognormal(0, 0.1, STEPS)
    values[50] *= times
    return values


def test_leap_of_norm_or_loss_raises_an_alarm_and_its_control_does_not() -> None:
    assert alarms(leaping(10)) == [(50, "spike")]
    assert alarms(leaping(1), losses=leaping(10)) == [(50, "spike")]
    assert not alarms(leaping(1), losses=leaping(1))


@pytest.mark.parametrize(("name", "value"), [("spike_norm_ratio", 100.0), ("spike_minimum", 55)])
def test_thresholds_of_the_run_hold(name: str, value: float) -> None:
    assert not alarms(leaping(10), thresholds={name: value})


def test_work_explains_a_leap() -> None:
    assert not alarms(leaping(10), addends=np.where(np.arange(STEPS) == 50, 640, 64))
    assert alarms(leaping(100), addends=np.where(np.arange(STEPS) == 50, 640, 64)) == [(50, "spike")]


def test_optimizers_have_histories_of_their_own() -> None:
    norms = np.tile(leaping(1), 4)
    actor = np.arange(len(norms)) % 5 == 4
    norms[actor] *= 40
    assert alarms(norms)
    rates = {"lr/0": np.where(actor, np.nan, 0.1), "lr/1": np.where(actor, 0.1, np.nan)}
    assert not alarms(norms, **rates)
