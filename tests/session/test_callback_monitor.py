"""``on_finding``: every finding once, off the training thread; training goes on whatever it raises."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.records import Finding, RunStatus
from backlight.session import outputs as live_findings


def train(run: Path, on_finding: object, wait: threading.Event | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.0)  # the second layer is in none
    with backlight.watch(model, optimizer, run=run, every=1, monitors=("health",), on_finding=on_finding):
        for step in range(12):
            model(torch.full((2, 2), float("nan") if step == 10 else 1.0)).sum().backward()
            optimizer.step()
            model.zero_grad()
        if wait is not None:
            assert wait.wait(60)


@pytest.mark.slow
def test_called_once_for_each_finding_during_the_run_and_at_its_end(tmp_path: Path) -> None:
    given: list[tuple[str, str]] = []
    called = threading.Event()

    def on_finding(finding: Finding) -> None:
        given.append((finding.rule, threading.current_thread().name))
        called.set()

    train(tmp_path / "run", on_finding, called)
    assert given[0] == ("non_finite", "backlight-findings")
    assert ("no_update", "MainThread") in given
    stored = backlight.open_run(tmp_path / "run").stored_findings()
    assert sorted(rule for rule, _ in given) == sorted(finding.rule for finding in stored)


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError("no channel"), SystemExit(3)])
def test_what_it_raises_is_one_warning_and_it_is_called_again(tmp_path: Path, error: BaseException) -> None:
    given: list[str] = []

    def on_finding(finding: Finding) -> None:
        given.append(finding.rule)
        raise error

    with pytest.warns(RuntimeWarning, match=f"on_finding raised {type(error).__name__}") as caught:
        train(tmp_path / "run", on_finding)
    assert len([warning for warning in caught if "on_finding" in str(warning.message)]) == 1
    assert len(given) > 1
    assert backlight.open_run(tmp_path / "run").status is RunStatus.FINISHED


@pytest.mark.slow
def test_one_that_hangs_does_not_hold_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_findings, "END_TIMEOUT_S", 0.1)
    called, free = threading.Event(), threading.Event()

    def on_finding(finding: Finding) -> None:
        called.set()
        free.wait(60)

    try:
        with pytest.warns(RuntimeWarning, match=r"what is done with new findings did not come to an end"):
            train(tmp_path / "run", on_finding, called)
    finally:
        free.set()
    assert backlight.open_run(tmp_path / "run").status is RunStatus.FINISHED


def test_something_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_finding: expected a function of a finding"):
        train(tmp_path / "run", "print")
    assert not (tmp_path / "run").exists()
