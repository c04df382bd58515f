"""What is known of a model and its optimizer when the script has dropped them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.capture.hub import HUB
from backlight.capture.parameters import Scope, build_table
from backlight.measure.stats.update import WeightSample


def pair(width: int = 4) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


def test_scope_of_what_is_gone_covers_nothing_else_and_keeps_its_table() -> None:
    model, optimizer = pair()
    scope = Scope([model], [optimizer])
    scope.refresh()
    names, key = [record.name for record in scope.table.records], id(optimizer)
    del model, optimizer
    others = [pair() for _ in range(8)]
    assert [record.name for record in scope.table.records] == names
    assert not scope.refresh()
    assert [record.name for record in scope.table.records] == names
    assert scope.models == scope.roots() == scope.optimizers() == scope.parameters() == []
    for _, optimizer in others:
        scope._given[id(optimizer)] = scope._given[key]  # as where it has the id of one that is gone
        assert not scope.covers(optimizer)
        assert not scope.holds(optimizer)


def test_parameters_keep_their_names_when_only_an_optimizer_holds_them() -> None:
    model, optimizer = pair()
    former = build_table([model], [optimizer], HUB.seen)
    del model
    after = build_table([], [optimizer], HUB.seen, former=former)
    assert {record.name for record in after.records} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    without = build_table([], [optimizer], HUB.seen)
    assert without.records[0].name == "optimizer0.group0.parameter0"


def test_weights_that_are_gone_are_not_measured() -> None:
    kept, gone = torch.ones(3), torch.ones(4)
    sample = WeightSample([kept, gone])
    assert sample.is_of([kept, gone])
    sample.before()
    kept += 1
    memory = weakref.ref(gone.untyped_storage())
    del gone
    assert memory() is None
    assert not sample.is_of([kept, torch.ones(4)])
    floats, integers = sample.after().arrays()
    assert integers[:, 0].tolist() == [1, 0]
    assert floats[0, 0] == pytest.approx(3**0.5)


@pytest.mark.parametrize("is_kept", [True, False])
def test_run_states_the_same_of_a_model_that_is_gone(is_kept: bool, tmp_path: Path) -> None:
    model, optimizer = pair()
    kept = [model, optimizer] if is_kept else []
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True) as watch:
        train(model, optimizer, 20)
        reference = weakref.ref(model)
        del model, optimizer
        train(*pair(5), 20)
        train(*pair(), 3)
    gc.collect()
    assert (reference() is not None) is is_kept
    run = backlight.open_run(tmp_path / "run")
    assert run.last_step() == 19
    assert [p.name for p in run.parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert run.fingerprint().parameter_count == 21
    assert (run.shortfall, [f.rule for f in watch.findings]) == ("", [])
    assert not run.events("parameters_changed")
    assert not run.events("unmeasured")
    del kept
