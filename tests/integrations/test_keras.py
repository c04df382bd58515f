"""The Keras callback in Keras' own fit, on torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import backlight
from integrations.torchrun import environment

HERE = Path(__file__).parent


def fit(run: Path | str, way: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, str(HERE / "keras_fit.py"), str(run), way],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines(), done.stderr


@pytest.mark.full
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_gradients_of_a_fit_are_taken_before_keras_clips_them(tmp_path: Path, policy: str) -> None:
    plain, _ = fit("-", policy)
    weights, said = fit(tmp_path / "run", policy)
    assert weights == plain
    assert said.count("next: backlight report") == 1
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert run.last_step() == 11
    # Not the gradients of the scaled loss (32768 times as large), and not those clipped to 0.1.
    total = run.scalar("total_norm").values
    assert ((total > 0.5) & (total < 10)).all()
    np.testing.assert_allclose(run.scalar("lr/0/0").values, 0.01, rtol=1e-6)
    assert run.scalar("val_loss", source="user").steps.tolist() == [5, 11]
    assert any("dense_1" in record.name for record in run.parameters())


@pytest.mark.full
def test_a_fit_that_raises_leaves_a_failed_run(tmp_path: Path) -> None:
    lines, _ = fit(tmp_path / "run", "raises")
    assert lines[0] == "injected"
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "failed"
    assert run.last_step() == 5


@pytest.mark.full
@pytest.mark.parametrize("backend", ["tensorflow", "numpy"])
def test_another_backend_is_refused_with_the_way_out(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import backlight.integrations.keras"],
        env={**environment(), "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert "FrameworkError: backlight.integrations.keras: expected Keras on torch, " in done.stderr
    assert "set KERAS_BACKEND=torch before keras is imported" in done.stderr
