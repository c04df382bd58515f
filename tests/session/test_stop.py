"""``stop_on`` of a watch: between steps, after ``on_stop``, whose errors are the user's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import backlight
from backlight.records import Finding, RunStatus, Severity, Subject
from backlight.session.settings import Settings
from backlight.session.stop import STOP_EXIT_CODE, StopAgreement, StopOutput

FINDING = Finding(
    severity=Severity.ERROR,
    title="NaN",
    detail="",
    subject=Subject(step=3),
    evidence=(),
    fix="",
    refuted_if="",
    rule="non_finite",
)
Train = Callable[..., nn.Module]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Train until the run is stopped, with two microbatches in each step."""
    done: list[str] = []

    def run(**settings: Any) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        path = tmp_path / "run"
        with backlight.watch(model, optimizer, run=path, every=1, monitors=("health",), **settings):
            while True:
                for _ in range(2):
                    bad = len(done) == 6
                    model(torch.full((2, 2), float("nan") if bad else 1.0)).sum().backward()
                    done.append("backward")
                optimizer.step()
                done.append("step")
                optimizer.zero_grad()

    yield run
    assert done[-1] == "step"  # never within a step


@pytest.mark.slow
def test_on_stop_is_called_with_the_finding_before_the_end(train: Train, tmp_path: Path) -> None:
    called: list[tuple[str, str]] = []

    def on_stop(finding: Finding) -> None:
        model = nn.Linear(2, 1)  # it may train something of its own
        model(torch.ones(1, 2)).sum().backward()
        called.append((finding.rule, threading.current_thread().name))

    with pytest.raises(backlight.StopTraining, match="non_finite: ") as stop:
        train(stop_on="error", on_stop=on_stop)
    assert called == [("non_finite", "MainThread")]
    assert (stop.value.code, stop.value.finding.rule) == (STOP_EXIT_CODE, "non_finite")
    assert not isinstance(stop.value, KeyboardInterrupt)
    run = backlight.open_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert run.events("stopped")[0].payload["rule"] == "non_finite"
    assert run.events("exception")[0].payload["type"] == "StopTraining"


@pytest.mark.slow
def test_what_on_stop_raises_is_the_users_error(train: Train, tmp_path: Path) -> None:
    error = OSError("disk full")

    def on_stop(finding: Finding) -> None:
        raise error

    with pytest.raises(OSError, match="disk full") as raised:
        train(stop_on=["non_finite"], on_stop=on_stop)
    assert raised.value is error
    assert raised.value.__context__ is None
    run = backlight.open_run(tmp_path / "run")
    assert (run.status, run.events("unmeasured")) == (RunStatus.FAILED, ())


@pytest.mark.parametrize(
    ("stop_on", "message"),
    [
        ("non_finit", "stop_on: no severity or rule is called 'non_finit'; did you mean 'non_finite'"),
        (
            "grokking",
            "stop_on: the rule 'grokking' needs the monitor 'grokking'; add it",
        ),
    ],
)
def test_rules_that_cannot_be_found_are_refused(stop_on: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        backlight.watch(run=tmp_path / "run", stop_on=stop_on)
    assert StopOutput.from_settings(Settings()) is None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


@pytest.mark.parametrize(("step", "agreed"), [(0, 8), (6, 8), (7, 16), (8, 16)])
def test_ranks_agree_on_a_step_that_lies_two_ahead(store: dist.HashStore, step: int, agreed: int) -> None:
    errors: list[Exception] = []
    first, second = StopAgreement(0, errors.append), StopAgreement(0, errors.append)
    assert second.finding_at(0) is None
    assert first.propose(step, FINDING) == agreed
    assert [second.finding_at(s) for s in range(step, agreed)] == [None] * (agreed - step)
    assert second.finding_at(agreed) == second.finding_at(agreed + 1) == FINDING
    first.wait_for_others(1)
    assert errors == []


def test_a_store_that_fails_leaves_each_rank_on_its_own(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = []

    def fail() -> dist.HashStore:
        raise OSError("connection lost")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", fail)
    agreement = StopAgreement(0, errors.append)
    assert agreement.finding_at(8) is None
    assert agreement.propose(9, FINDING) == 9
    agreement.wait_for_others(2)
    assert [str(error) for error in errors] == ["connection lost"]


def test_without_a_process_group_a_rank_stops_at_once() -> None:
    assert StopAgreement(0, pytest.fail).propose(9, FINDING) == 9
