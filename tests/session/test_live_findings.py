"""Evaluation while the run goes on: each finding once, warnings confirmed, rank 0 only, never in the way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight.monitor import MONITORS, Monitor
from backlight.records import Evidence, Finding, RunStatus, Severity, Subject
from backlight.report.source import Source
from backlight.report.verdict import outcome
from backlight.session import outputs as live_findings
from backlight.session.outputs import LiveFindings, NewFindings
from processes import run_captured

WARNING = Finding(
    severity=Severity.WARNING,
    title="title",
    detail="detail",
    subject=Subject(parameter="a.weight"),
    evidence=(Evidence("series/gradient/norm/a.weight", 1), Evidence("series/gradient/norm/a.bias", 1)),
    fix="fix",
    refuted_if="refuted",
    rule="no_update",
)
ERROR = replace(WARNING, severity=Severity.ERROR, rule="non_finite")


def test_an_error_is_new_once_and_a_warning_when_it_is_confirmed() -> None:
    new = NewFindings()
    assert new.take([WARNING, ERROR]) == [ERROR]
    assert new.take([WARNING, ERROR]) == [WARNING]
    assert new.take([WARNING, ERROR]) == []
    other = replace(WARNING, subject=Subject(parameter="a.bias"))
    assert new.take([other]) == new.take([other]) == []  # an earlier one has evidence on it


def test_a_refuted_warning_is_not_new() -> None:
    new = NewFindings()
    assert new.take([WARNING]) == new.take([]) == new.take([WARNING]) == []
    assert new.take([], only={"spike"}) == []  # says nothing about other rules
    assert new.take([WARNING]) == [WARNING]


def test_each_kind_of_fact_of_one_rule_is_new_once() -> None:
    new = NewFindings()
    fact = replace(
        WARNING,
        title="The loader returns the same order at 2 epochs",
        subject=Subject(step=7),
        evidence=(Evidence("events/contradiction", 7, 2),),
        rule="repeated_data",
    )
    other = replace(fact, title="The seed is set again at `train.py:3`", subject=Subject(step=8))
    assert new.take([fact], facts={"repeated_data"}) == [fact]
    assert new.take([fact, other], facts={"repeated_data"}) == [other]
    later = [replace(fact, title="The loader returns the same order at 12 epochs"), other]
    assert new.take(later, facts={"repeated_data"}) == new.rest(later) == []
    assert new.rest([replace(fact, severity=Severity.ERROR)]) != []


def test_a_fact_of_another_kind_is_evaluated_though_its_rule_has_reported() -> None:
    live = LiveFindings()
    live._new.know([replace(WARNING, rule="repeated_data")])
    for kind in ("order", "seeded", "order"):
        live.on_fact("repeated_data", kind)
    assert list(live._due) == ["repeated_data"] * 2
    live.on_fact("not_restored", "rate")
    live.on_fact("not_restored", "rate")  # it has not reported so far
    assert list(live._due)[2:] == ["not_restored"] * 2


class Listening(Monitor):
    """Notes what is delivered."""

    name = "listening"
    requested_by = None

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self.threads: set[str] = set()
        self.delivered = threading.Event()

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        self.found += findings
        self.threads.add(threading.current_thread().name)
        self.delivered.set()


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Listening:
    one = Listening()
    monkeypatch.setattr(Listening, "from_settings", classmethod(lambda cls, settings: one))
    monkeypatch.setitem(MONITORS._entries, "listening", Listening)
    return one


def train(run: Path, until: threading.Event, *, bad: bool = True, steps: int = 3, **settings: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with backlight.watch(model, optimizer, run=run, every=1, monitors=("health",), **settings):
        for step in range(steps):
            model(torch.full((2, 2), float("nan") if bad and step == 1 else 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        until.wait(60)


@pytest.mark.slow
def test_findings_are_delivered_once_while_the_run_goes_on(
    tmp_path: Path, listening: Listening, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run", listening.delivered, summary=False)
    assert [(f.rule, f.severity, f.subject.step) for f in listening.found] == [
        ("non_finite", Severity.ERROR, 1)
    ]
    assert listening.threads == {"backlight-findings"}
    out, errors = capfd.readouterr()
    assert out == ""
    assert errors.startswith("backlight: error: ")
    assert errors.rstrip().endswith("(non_finite)")


@pytest.mark.slow
def test_a_failing_evaluation_is_one_warning(
    tmp_path: Path, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def broken(path: Path) -> Any:
        tried.set()
        raise OSError("gone")

    monkeypatch.setattr(live_findings, "open_run", broken)
    with pytest.warns(
        RuntimeWarning, match="not measured: findings before the end of the run, after OSError: gone"
    ):
        train(tmp_path / "run", tried)
    assert listening.threads == {"MainThread"}  # with what was found at the end
    run = backlight.open_run(tmp_path / "run")
    assert run.status is RunStatus.FINISHED
    assert "non_finite" in {finding.rule for finding in run.stored_findings()}


@pytest.mark.slow
def test_what_an_earlier_attempt_found_is_not_new(
    tmp_path: Path, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run", listening.delivered, summary=False)
    listening.found.clear()
    evaluated = threading.Event()
    know = NewFindings.know

    def note(new: NewFindings, findings: Any) -> None:
        know(new, findings)
        evaluated.set()

    monkeypatch.setattr(NewFindings, "know", note)
    train(tmp_path / "run", evaluated, bad=False, resume=True)
    assert evaluated.is_set()
    assert listening.found == []


REFUSED = """
import sys, threading, time, torch, backlight
from backlight.report.source import Source
from backlight.report.verdict import outcome
from backlight.session import outputs as live_findings

begun = threading.Event()

def evaluate(*_, **__):
    begun.set()
    time.sleep(1)
    print("evaluated", flush=True)
    return []

live_findings.evaluate_rules = evaluate
resumes = len(sys.argv) > 1
model = torch.nn.Linear(2, 2 if resumes else 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with backlight.watch(model, optimizer, run="run", resume=resumes, monitors="health") as watch:
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if resumes:
            begun.wait(60)
print("trained", watch.is_recorded, flush=True)
"""


@pytest.mark.slow
def test_interpreter_does_not_end_under_the_evaluation_of_a_run_that_is_refused(tmp_path: Path) -> None:
    """It reads the earlier attempts at once, and would be in native code while the libraries are unloaded."""
    (tmp_path / "train.py").write_text(REFUSED)
    command = [sys.executable, "-W", "ignore", "train.py"]
    for arguments, printed in ([], "trained True\n"), (["resume"], "trained False\nevaluated\n"):
        done = run_captured([*command, *arguments], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_other_ranks_evaluate_nothing() -> None:
    monitor = LiveFindings()
    run: Any = SimpleNamespace(rank=1, writer=SimpleNamespace(attempt=1), account=lambda timed: None)
    monitor.attach(run)
    monitor.on_alarm(3, "non_finite")
    monitor.on_flush()
    assert monitor._thread is None


class Unregistered(nn.Module):
    """Holds a layer in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.rest = [nn.Linear(2, 1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rest[0](self.first(x))
        return y


@pytest.mark.slow
def test_a_fact_of_the_first_step_is_delivered_during_it(
    tmp_path: Path, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a second step, a flush that is due, or an evaluation of all rules."""
    monkeypatch.setattr(live_findings, "PERIOD_S", 1e9)
    settings: dict[str, Any] = {"monitors": ("correctness",), "flush_interval": 1e9, "summary": False}
    with backlight.watch(run=tmp_path / "run", **settings):
        model = Unregistered()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert listening.delivered.wait(60)
        (finding,) = listening.found
        assert (finding.rule, finding.subject.step) == ("trained_tensors", 0)
    assert len(listening.found) == 1


def test_a_warning_about_a_fact_needs_no_second_evaluation() -> None:
    new = NewFindings()
    assert new.take([WARNING], facts={"spike"}) == []
    assert NewFindings().take([WARNING], facts={WARNING.rule}) == [WARNING]


@pytest.mark.slow
def test_a_reported_finding_that_is_not_found_at_the_end_is_withdrawn(
    tmp_path: Path, listening: Listening, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live_findings, "PERIOD_S", 0.0)
    monkeypatch.setattr(live_findings, "evaluate_rules", lambda *_, **__: [WARNING, ERROR])
    train(tmp_path / "run", listening.delivered, bad=False, flush_interval=0.01)
    printed = capfd.readouterr().err
    run = backlight.open_run(tmp_path / "run")
    (error,) = (one for one in outcome(Source(run)).withdrawn if one.rule == ERROR.rule)
    assert (error.severity, error.title) == (Severity.ERROR, "title")
    assert error.reason == "Over all 3 steps the rule does not find it. It is refuted if refuted."
    assert error.text in printed
    assert outcome(Source(run, (ERROR,))).withdrawn == ()
    (weaker,) = outcome(Source(run, (replace(ERROR, severity=Severity.WARNING),))).withdrawn
    assert weaker.reason == "Over all 3 steps it is: warning."
