"""Steps without an optimizer of torch: marked by hand, or reported with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backlight


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def train(
    model: nn.Module, steps: int, watch: backlight.Watch | None = None, *, zero_first: bool = True
) -> list[float]:
    """Update by hand; return the total norm of the gradient of each step."""
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    norms = []
    for _ in range(steps):
        if zero_first:
            model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
        if not zero_first:
            model.zero_grad()
        if watch is not None:
            watch.mark_step()
    return norms


def test_marked_steps_are_recorded(tmp_path: Path) -> None:
    model = build()
    with backlight.watch(model, run=tmp_path / "run", every=3) as watch:
        norms = train(model, 20, watch)
        assert watch.step == 20
    run = backlight.open_run(tmp_path / "run")
    recorded = run.series_steps("gradient").tolist()
    assert recorded == list(range(0, 20, 3))
    expected = [norms[step] for step in recorded]
    assert run.scalar("total_norm").values.tolist() == pytest.approx(expected, rel=1e-6)
    assert run.scalar("loss").steps.tolist() == list(range(20))  # of every step, whatever is recorded
    assert backlight.findings_of(run) == []


def test_gradients_cleared_before_the_mark_are_not_measured(tmp_path: Path) -> None:
    model = build()
    with backlight.watch(model, run=tmp_path / "run", every=1) as watch:
        train(model, 5, watch, zero_first=False)
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("loss").steps.tolist() == list(range(5))
    assert not run.frame("gradient", "norm").measured.any()


def test_backwards_without_a_step_name_the_fix(tmp_path: Path) -> None:
    model = build()
    with backlight.watch(model, run=tmp_path / "run", quiet=True) as watch:
        train(model, 5)
    reason = why_no_gradient(tmp_path / "run")
    assert "5 backward passes were seen" in reason
    assert "watch.mark_step()" in reason
    watch.mark_step()  # after the end: nothing is recorded any more


def why_no_gradient(path: Path) -> str:
    events = backlight.open_run(path).events("unmeasured")
    (reason,) = [event.payload["reason"] for event in events if event.payload["what"] == "gradient"]
    return str(reason)


def test_steps_of_no_known_model_are_not_healthy(tmp_path: Path) -> None:
    model = build()
    with backlight.watch(run=tmp_path / "run", quiet=True) as watch:
        train(model, 5, watch)
    assert "backlight.watch(model)" in why_no_gradient(tmp_path / "run")
    assert "Not measured" in str(backlight.findings_of(backlight.open_run(tmp_path / "run")))


def test_watch_that_was_not_started_refuses(tmp_path: Path) -> None:
    watch = backlight.watch(run=tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"watch\.mark_step: this watch was not started"):
        watch.mark_step()
    watch.start()
    watch.stop()
