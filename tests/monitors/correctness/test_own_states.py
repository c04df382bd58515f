"""States of a module that it loads itself, where that is meant."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.findings.evaluate import Findings, evaluate_rules
from backlight.store.read.run import open_run

pytestmark = pytest.mark.slow


def trained(path: Path, members: int) -> Findings:
    """Train a population, all members of which load the weights of the first one after the second step."""
    population = [nn.Linear(4, 3)]
    population += [copy.deepcopy(population[0]) for _ in range(members - 1)]
    with backlight.watch(run=path, monitors=("correctness",), quiet=True):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in population]
        for step in range(4):
            for model, optimizer in zip(population, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            if step == 1:
                for model in population:
                    model.load_state_dict(population[0].state_dict())
    return evaluate_rules(open_run(path))


def test_population_that_loads_the_best_of_its_members_is_silent(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", members=3) == []


def test_line_that_loads_nothing_else_is_reported(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path / "run", members=1)
    assert finding.rule == "not_restored"
    assert finding.subject.line is not None
