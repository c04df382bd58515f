"""Steps without an optimizer of torch: marked by hand, or reported with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backlight

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("is_given", [True, False])
def test_updates_by_hand_are_steps(tmp_path: Path, is_given: bool, is_marked: bool, zero_first: bool) -> None:
    model = build()
    given = (model,) if is_given else ()
    with backlight.watch(*given, run=tmp_path / "run", every=1, quiet=True) as watch:
        norms = train(model, 5, watch if is_marked else None, zero_first=zero_first)
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("loss").steps.tolist() == list(range(5))
    assert run.scalar("total_norm").values.tolist() == pytest.approx(norms, rel=1e-6)
    assert backlight.findings_of(run) == []


def test_update_by_hand_that_leaves_no_trace_is_a_step(tmp_path: Path) -> None:
    model, x = build(), torch.randn(32, 8)
    with backlight.watch(run=tmp_path / "run", every=1, quiet=True):
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = None
            model(x).square().mean().backward()
            for parameter in model.parameters():
                parameter.data += -0.1 * parameter.grad
    assert backlight.open_run(tmp_path / "run").scalar("total_norm").steps.tolist() == [0, 1, 2, 3]


def test_sums_of_microbatches_by_hand_are_not_measured(tmp_path: Path) -> None:
    """When they are complete is not known before they are used."""
    model = build()
    with backlight.watch(run=tmp_path / "run", every=1, quiet=True):
        for _ in range(3):
            for x in torch.randn(2, 32, 8):
                (model(x).square().mean() / 2).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad.zero_()
    run = backlight.open_run(tmp_path / "run")
    assert run.scalar("loss").steps.tolist() == [0, 1, 2]
    assert not run.has("gradient")


def test_backwards_without_an_update_name_the_fix(tmp_path: Path) -> None:
    model = build()
    with backlight.watch(model, run=tmp_path / "run", quiet=True) as watch:
        for _ in range(5):
            model(torch.randn(32, 8)).sum().backward()
    reason = why_no_gradient(tmp_path / "run")
    assert "5 backward passes were seen" in reason
    assert "watch.mark_step()" in reason
    watch.mark_step()  # after the end: nothing is recorded any more


def why_no_gradient(path: Path) -> str:
    events = backlight.open_run(path).events("unmeasured")
    (reason,) = [event.payload["reason"] for event in events if event.payload["what"] == "gradient"]
    return str(reason)


def test_tensors_of_no_module_are_measured(tmp_path: Path) -> None:
    first, second = torch.randn(8, 16, requires_grad=True), torch.randn(16, 3, requires_grad=True)
    with backlight.watch(run=tmp_path / "run", every=1, quiet=True):
        for _ in range(3):
            first.grad = second.grad = None
            ((torch.randn(32, 8) @ first).tanh() @ second).square().mean().backward()
            for tensor in (first, second):
                tensor.data -= 0.1 * tensor.grad
    frame = backlight.open_run(tmp_path / "run").frame("gradient", "norm")
    assert (frame.names, frame.measured.all()) == (("tensor0", "tensor1"), True)
    assert frame.values[-1].tolist() == pytest.approx([float(second.grad.norm()), float(first.grad.norm())])


def test_watch_that_was_not_started_refuses(tmp_path: Path) -> None:
    watch = backlight.watch(run=tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"watch\.mark_step: this watch was not started"):
        watch.mark_step()
    watch.start()
    watch.stop()
