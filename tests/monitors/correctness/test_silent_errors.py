"""Ports of published cases and well-known errors are found, and their controls are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import backlight
from backlight.findings.evaluate import Findings, evaluate_rules
from backlight.records import Severity
from backlight.store.read.run import open_run
from faults.injection import Fault, text_of
from faults.published_on_ranks import CASES, HANGING
from faults.silent import published_cases, well_known
from ranks.launching import HERE, launched

pytestmark = pytest.mark.slow

FAULTS = {**published_cases.CASES, **well_known.FAULTS}
FOUND = [name for name, fault in FAULTS.items() if "rule" in fault.expected]
ON_RANKS = [name for name, fault in CASES.items() if "rule" in fault.expected and name not in HANGING]


def watched(path: Path, train: Callable[[], None]) -> Findings:
    torch.manual_seed(0)
    with backlight.watch(run=path, every=1, monitors=("health", "correctness"), quiet=True):
        train()
    return evaluate_rules(open_run(path))


def check(fault: Fault, findings: Findings, control: Findings) -> None:
    """Compare with what is expected; the control has neither a warning nor an error."""
    expected = fault.expected
    hits = [f for f in findings if (f.rule, f.severity.value) == (expected["rule"], expected["severity"])]
    assert hits
    assert any(str(expected.get("names", "")) in text_of(hit) for hit in hits)
    assert [f for f in control if f.severity is not Severity.INFO] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOUND)
def test_error_is_found_and_its_control_is_silent(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fault = FAULTS[name]
    if fault.expected["rule"] == "uneven_microbatches":
        request.getfixturevalue("read_targets")
    injected = watched(tmp_path / "injected", lambda: fault.train(True))
    check(fault, injected, watched(tmp_path / "control", lambda: fault.train(False)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases of two ranks in one launch."""
    made = tmp_path_factory.mktemp("cases")
    script = HERE.parent / "faults" / "published_on_ranks.py"
    status, errors = launched(2, script, made, ",".join(ON_RANKS), timeout=120.0)
    assert status == 0, errors[-4000:]
    return made


@pytest.mark.parametrize("name", ON_RANKS)
def test_error_on_ranks_is_found_and_its_control_is_silent(name: str, folder: Path) -> None:
    runs = open_run(folder / name), open_run(folder / f"{name}-control")
    check(CASES[name], *map(evaluate_rules, runs))
