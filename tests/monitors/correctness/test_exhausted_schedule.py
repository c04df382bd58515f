"""Learning rates that have decayed to nothing long before the end, from recorded rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.records import Finding, Fingerprint, Severity
from run_builder import build_run

STEPS = 200
AT = np.arange(STEPS)


def cosine(steps: int) -> np.ndarray:
    return np.array([0.5 * (1 + math.cos(math.pi * min(step, steps) / steps)) for step in range(STEPS)])


def found(
    path: Path, *rates: Sequence[float] | np.ndarray, steps: Sequence[int] = range(STEPS)
) -> list[Finding]:
    scalars = {f"lr/0/{g}": {step: values[step] for step in steps} for g, values in enumerate(rates)}
    about = Fingerprint(optimizers=("AdamW",))
    run = build_run(path, monitors=("correctness",), fingerprint=about, scalars=scalars)
    return [finding for finding in evaluate_rules(run) if finding.rule == "schedule"]


def test_schedule_that_is_used_up_early_is_named(tmp_path: Path) -> None:
    # A scheduler that takes two steps per step of the optimizer is at 0 after half of the run.
    (finding,) = found(tmp_path / "twice", 1e-3 * np.minimum(AT / 10, 1) * cosine(STEPS // 2))
    assert finding.title == "The learning rate has decayed to 0 by step 100"
    assert (finding.severity, finding.subject.step) == (Severity.WARNING, 100)
    assert "AdamW" in finding.detail
    assert "100 of 200 steps (50 %)" in finding.detail
    (fast,) = found(tmp_path / "fast", 0.1 * 0.5**AT)
    assert fast.subject.step == 17


def test_steps_are_counted_and_not_recordings(tmp_path: Path) -> None:
    steps = [*range(64), *range(64, STEPS, 34)]
    assert found(tmp_path / "early", 1e-3 * cosine(60), steps=steps)
    assert not found(
        tmp_path / "late", 1e-3 * np.where(AT < 150, 1.0, 0.0), steps=[*range(0, 150, 30), *AT[150:]]
    )


@pytest.mark.parametrize(
    "rates",
    [
        1e-3 * cosine(STEPS),
        1e-3 * cosine(STEPS - 20),
        1e-3 * AT / STEPS,  # a warm-up that lasts
        1e-3 * np.where(AT < 150, 0.0, 1.0),  # one that begins late
        1e-6 + 0.0 * AT,
        0.0 * AT,  # a frozen group
        0.1 * 0.1 ** (AT // 50),  # as a plateau lowers it
        1e-3 * (0.5 + 0.5 * np.cos(AT / 3)),  # restarts
    ],
    ids=("cosine", "ends early", "warm-up", "late", "small", "frozen", "plateau", "restarts"),
)
def test_sound_schedules_are_silent(rates: np.ndarray, tmp_path: Path) -> None:
    assert not found(tmp_path / "run", rates)


def test_one_group_that_is_frozen_later_is_silent(tmp_path: Path) -> None:
    assert not found(tmp_path / "run", 1e-3 * (AT < 50), 1e-3 * cosine(STEPS))
