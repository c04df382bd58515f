"""Stored runs with known times, profiles and runtime info, and rules evaluated on them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.steptime.model.evidence import RUNTIME_INFO, read_profile
from backlight.records import Finding, Fingerprint
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter

Stored = Callable[..., Run]
Evaluated = Callable[..., list[Finding]]


def write(
    path: Path,
    phases: Mapping[str, float] | None = None,
    *,
    steps: int = 60,
    changes: Mapping[tuple[int, str], float] | None = None,
    profile: Mapping[str, Any] | None = None,
    runtime_info: Mapping[str, Any] | None = {},  # written as it is; None of a run that goes on
    events: Sequence[tuple[int | None, str, Mapping[str, Any]]] = (),
    fingerprint: Fingerprint | None = None,
    ranks: Sequence[Mapping[str, float]] = (),
    scalars: Mapping[str, Mapping[int, float]] | None = None,
    seed: int = 0,
) -> Run:
    """Write steps whose phases scatter by one percent around ``phases``; ``changes`` set single times."""
    random = np.random.default_rng(seed)
    each = list(ranks) or [phases or {}]
    writers = [
        RunWriter.create(
            path, name="run", rank=rank, world_size=len(each), run_id="one", monitors=("steptime",)
        )
        for rank in range(len(each))
    ]
    for rank, (writer, levels) in enumerate(zip(writers, each, strict=True)):
        for step in range(steps if levels else 0):
            for name, level in levels.items():
                value = level * float(np.exp(random.normal(0, 0.01)))
                writer.scalar(step, f"phase/{name}", (changes or {}).get((step, name), value))
        for name, by_step in (scalars or {}).items():
            for step, value in by_step.items():
                writer.scalar(step, name, value)
        for step, kind, payload in events:
            writer.event(step, kind, payload)
        if runtime_info is not None:
            writer.event(steps - 1, RUNTIME_INFO, runtime_info)
        if fingerprint is not None:
            writer.fingerprint(fingerprint)
        if profile is not None and rank == 0:
            writer.evidence("profile.json", json.dumps(profile))
    for writer in writers[::-1]:  # an attempt ends with its rank 0
        writer.close()
    return open_run(path)


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
    return lambda *args, **more: write(tmp_path / f"run-{next(counter)}", *args, **more)


@pytest.fixture
def evaluated() -> Evaluated:
    def by_rule(run: Run, name: str | None = None, **changes: float) -> list[Finding]:
        found = evaluate_rules(run, {"steptime": changes})
        for finding in found:
            check_evidence(run, finding)
        return [finding for finding in found if name in {None, finding.rule}]

    return by_rule
