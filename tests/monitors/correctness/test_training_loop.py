"""Each injected error of a training loop has its finding, and each control has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import backlight
from backlight.findings.evaluate import Findings, evaluate_rules
from backlight.store.read.run import open_run
from faults import silent


def findings(path: Path, train: Callable[[], None]) -> Findings:
    """Return the findings of a watched training run."""
    with backlight.watch(run=path, monitors=("correctness",)):
        train()
    run = open_run(path)
    assert not run.events("unmeasured")
    return evaluate_rules(run)


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("name", silent.FAULTS)
def test_injected_error_is_found_and_its_control_is_not(name: str, tmp_path: Path) -> None:
    fault = silent.FAULTS[name]
    (found,) = findings(tmp_path / "injected", lambda: fault.train(True))
    assert found.rule == fault.expected["rule"]
    assert found.severity.value == fault.expected["severity"]
    assert found.subject.step == fault.expected["step"]
    events = open_run(tmp_path / "injected").events("contradiction")
    assert {evidence.step for evidence in found.evidence} <= {event.step for event in events}
    assert {event.payload.get("kind") for event in events} == {
        fault.expected.get("kind", events[0].payload.get("kind"))
    }
    assert findings(tmp_path / "control", lambda: fault.train(False)) == []


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("name", silent.CONTROLS)
def test_loop_that_comes_close_has_no_finding(name: str, tmp_path: Path) -> None:
    assert findings(tmp_path / "run", silent.CONTROLS[name]) == []
    assert not open_run(tmp_path / "run").events("contradiction")
