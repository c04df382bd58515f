"""Stored runs with known times, profiles and runtime info, and rules evaluated on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.steptime.model.evidence import read_profile
from backlight.records import Finding
from backlight.store.read.run import Run
from run_builder import build_steptime_run

Stored = Callable[..., Run]
Evaluated = Callable[..., list[Finding]]


def check_evidence(run: Run, finding: Finding) -> None:
    """Check that every path exists in the run, and that a finding is complete."""
    assert finding.detail.endswith(".")
    assert "Expected gain: " in finding.detail
    assert finding.fix
    assert finding.refuted_if
    assert finding.evidence
    for evidence in finding.evidence:
        kind, _, rest = evidence.path.partition("/")
        if kind == "scalars" and evidence.step is not None:
            scalar = run.scalar(rest)
            np.testing.assert_allclose(
                float(str(evidence.value)), scalar.values[scalar.steps == evidence.step][0]
            )
        elif kind == "scalars":
            assert rest in run.scalar_names("backlight")
        elif kind == "events":
            assert evidence.step in {event.step for event in run.events(rest)}
        elif kind == "fingerprint":
            assert hasattr(run.fingerprint(), rest.split("/")[0])
        else:
            assert kind == "profile"
            profile = read_profile(run)
            assert profile is not None
            assert profile.content.get(rest.split("/")[0]) is not None, evidence.path


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    counter = itertools.count()
    return lambda *args, **more: build_steptime_run(tmp_path / f"run-{next(counter)}", *args, **more)


@pytest.fixture
def evaluated() -> Evaluated:
    def by_rule(run: Run, name: str | None = None, **changes: float) -> list[Finding]:
        found = evaluate_rules(run, {"steptime": changes})
        for finding in found:
            check_evidence(run, finding)
        return [finding for finding in found if name in {None, finding.rule}]

    return by_rule
