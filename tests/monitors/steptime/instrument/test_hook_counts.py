from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.steptime.instrument.hook_counts import HookCounts
from backlight.records import Severity

STEPS = 60


def observe(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A hook of the script."""


def forward_hook(model: nn.Sequential, step: int) -> None:
    model[1].register_forward_hook(observe)


def gradient_hook(model: nn.Sequential, step: int) -> None:
    model[0].weight.register_hook(lambda gradient: gradient)


def backward_hook(model: nn.Sequential, step: int) -> None:
    model[2].register_full_backward_hook(lambda module, inputs, outputs: None)


def registered_once(model: nn.Sequential, step: int) -> None:
    if step == 0:
        for _ in range(STEPS):
            model[1].register_forward_hook(observe)


def removed_in_each_step(model: nn.Sequential, step: int) -> None:
    model[1].register_forward_hook(observe).remove()


def one_in_an_epoch(model: nn.Sequential, step: int) -> None:
    if step % 4 == 0:
        model[1].register_forward_hook(observe)


def titles(path: Path, register: Callable[[nn.Sequential, int], None]) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=path, monitors=("steptime",), every=1, quiet=True):
        for step in range(STEPS):
            register(model, step)
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
    findings = [f for f in evaluate_rules(backlight.open_run(path)) if f.rule == "memory"]
    assert all(f.severity is Severity.WARNING and f.subject.line for f in findings)
    return [f.title for f in findings]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("register", "title"),
    [
        (forward_hook, "`1` gets another forward hook in each step"),
        (gradient_hook, "`0.weight` gets another gradient hook in each step"),
        (backward_hook, "`2` gets another backward hook in each step"),
    ],
)
def test_hooks_that_a_loop_registers_again_are_found(
    register: Callable[[nn.Sequential, int], None], title: str, tmp_path: Path
) -> None:
    assert titles(tmp_path / "run", register) == [title]


@pytest.mark.slow
@pytest.mark.parametrize("register", [registered_once, removed_in_each_step, one_in_an_epoch])
def test_hooks_that_do_not_grow_with_the_steps_are_none(
    register: Callable[[nn.Sequential, int], None], tmp_path: Path
) -> None:
    assert not titles(tmp_path / "run", register)


def test_hooks_that_cease_to_grow_are_recorded_as_such() -> None:
    records: list[dict[str, Any]] = []
    counts, model = HookCounts(lambda facts, step: records.append(facts)), nn.Sequential(nn.ReLU())
    for step in range(1, 65):
        if step < 40:
            model[0].register_forward_hook(observe)
        if step in {8, 16, 32, 64}:
            counts.read(step, [("net.", model)])
    assert [facts["names"] for facts in records] == [1, 0]
    assert records[0]["name"] == "net.0"
    assert records[0]["hooks"] == 32
