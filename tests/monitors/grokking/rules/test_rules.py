"""The rule on synthetic runs and their controls."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.grokking.model.reader import controls_of, detect_run, stated
from backlight.records import Severity
from grokking_runs import Grok, write_grokking_run, write_scalars
from run_builder import build_run


def test_verdict_is_finding_with_both_times(tmp_path: Path) -> None:
    run = write_grokking_run(tmp_path / "run")
    (found,) = evaluate_rules(run)
    detection = detect_run(run)
    assert (found.rule, found.severity, found.subject.verdict) == ("grokking", Severity.INFO, "grokking")
    assert found.subject.step == detection.generalised.by
    assert detection.strong
    assert f"{detection.generalised}" in found.detail
    locations = {(e.path, e.step) for e in found.evidence}
    assert ("user/test_accuracy", detection.generalised.by) in locations
    assert ("user/train_accuracy", detection.memorised.after) in locations
    (found,) = evaluate_rules(run, {"grokking": {"delay_ratio": 100.0}})
    assert found.subject.verdict == "no-delay"
    assert found.overridden == {"delay_ratio": 100.0}


def test_run_without_accuracies_has_no_verdict(tmp_path: Path) -> None:
    assert evaluate_rules(write_grokking_run(tmp_path / "run", Grok(accuracies=False, steps=100))) == []


def accuracies(train: float, test: float) -> dict[str, float]:
    return {"train_accuracy": train, "test_accuracy": test}


def test_accuracies_in_percent_are_finding_not_exception(tmp_path: Path) -> None:
    (found,) = evaluate_rules(
        write_scalars(tmp_path / "run", *((step, accuracies(99.0, 40.0)) for step in range(20)))
    )
    assert found.severity is Severity.WARNING
    assert "not as percentages" in found.detail


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("degradation", {"from": "full factors", "to": "Gram", "reason": "1.2 GB are free"}),
        ("disk_warning", {"free": 812_000_000, "threshold": 1_000_000_000, "action": "Gram from here on"}),
        ("unmeasured", {"what": "gram", "reason": "gram: the coverage of parameter 'w' failed"}),
    ],
)
def test_event_about_measurement_is_no_finding(tmp_path: Path, kind: str, payload: dict[str, object]) -> None:
    run = build_run(tmp_path / "run", monitors=("grokking",), events=[(3, kind, payload)])
    assert evaluate_rules(run) == []
    assert [event.payload for event in run.events(kind)] == [payload]


@pytest.mark.slow
def test_control_is_found_by_its_event_and_reported_as_memorised(tmp_path: Path) -> None:
    run = write_grokking_run(tmp_path / "run")
    control = write_grokking_run(tmp_path / "a", Grok(control="random-labels", control_of=run.run_id))
    other = write_grokking_run(tmp_path / "b", Grok(control="random-labels", control_of="else", steps=300))
    plain = write_grokking_run(tmp_path / "c", Grok(steps=300))
    found = controls_of(run, [run, other, plain, control])[0]
    assert found.run_id == control.run_id
    assert controls_of(run, [run, other, plain]) == []
    assert stated(control).control == "random-labels"
    (finding,) = evaluate_rules(control)
    assert (finding.severity, finding.subject.verdict) == (Severity.INFO, "memorised")


def test_chance_and_sizes_may_be_logged(tmp_path: Path) -> None:
    rows = [
        (step, accuracies(1.0 if step > 20 else 0.3, 0.98 if step > 300 else 0.25 + step % 10 / 400))
        for step in range(0, 400, 2)
    ]
    run = write_scalars(tmp_path / "run", (0, {"chance": 0.25, "test_size": 400.0}), *rows)
    assert (stated(run).chance, stated(run).test_size, stated(run).train_size) == (0.25, 400, None)
    detection = detect_run(run)
    assert detection.chance == 0.25
    assert not any("chance is not known" in note or "size of the test" in note for note in detection.notes)
    assert detect_run(run, chance=0.1).chance == 0.1
    (found,) = evaluate_rules(run)
    assert found.subject.verdict == "grokking"
    notes = " ".join(detect_run(write_scalars(tmp_path / "unstated", *rows)).notes)
    assert "watch.log(chance=...) or backlight grok detect RUN --chance" in notes
    assert "watch.log(test_size=...)" in notes
