"""Checks listen at the observed steps and those beside them, and at no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.analysis.report import source_of
from backlight.capture.hub import HUB
from backlight.monitors.correctness.instrument.check import Check, Schedule
from backlight.monitors.correctness.instrument.gradient_use import GradientUse
from backlight.monitors.correctness.instrument.module_modes import ModuleModes
from backlight.monitors.correctness.model.facts import observed_steps
from backlight.report.verdict import outcome


def test_windows_grow_and_have_a_step_on_each_side() -> None:
    schedule, due, near = Schedule(), [], []
    for step in range(40):
        schedule.begin(step)
        due += [step] * schedule.due
        near += [step] * schedule.near
    assert due == [*range(8), 13, 14, 21, 22, 34, 35]
    assert near == [*range(9), 12, 13, 14, 15, 20, 21, 22, 23, 33, 34, 35, 36]


def test_a_hook_that_no_event_calls_is_refused() -> None:
    with pytest.raises(
        TypeError, match="Misspelt: no event and no option of a check is called 'forward_start'"
    ):
        type("Misspelt", (Check,), {"name": "misspelt", "forward_start": lambda self: None})


@pytest.mark.slow
def test_checks_leave_the_hub_between_windows_and_find_errors_that_begin_later(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listening = []
    with backlight.watch(model, optimizer, run=tmp_path / "run", monitors=("correctness",)) as watch:
        for step in range(24):
            model(torch.randn(8, 4)).square().mean().backward()
            kinds = {type(listener) for listener in HUB.listeners}
            listening += [step] * (GradientUse in kinds)
            assert ModuleModes in kinds
            optimizer.step()
            if step < 16:
                optimizer.zero_grad()
    assert listening == [*range(9), 12, 13, 14, 15, 20, 21, 22, 23]
    (found,) = watch.findings
    assert found.rule == "gradients_not_cleared"
    assert found.subject.step == 21  # the first that adds to gradients which an observed step used


@pytest.mark.slow
def test_report_says_how_many_steps_were_checked(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", monitors=("correctness",)):
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    run = backlight.open_run(tmp_path / "run")
    assert observed_steps(run) == 10
    verdict = outcome(source_of(run))
    assert verdict.tone == "clear"
    assert verdict.headline == "No findings"
    assert "checked at 10 steps" in verdict.detail


@pytest.mark.slow
def test_loop_that_takes_no_step_is_not_checked(tmp_path: Path) -> None:
    with backlight.watch(run=tmp_path / "run", monitors=("correctness",)):
        nn.Linear(4, 3)(torch.randn(8, 4)).square().mean().backward()
    assert outcome(source_of(backlight.open_run(tmp_path / "run"))).tone == "unmeasured"
