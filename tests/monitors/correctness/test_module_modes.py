"""From how many observed steps on a mode is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.correctness.rules.module_modes import Active, EvaluatedInTraining, TrainedInEvaluation
from injected_faults import correctness

DROPOUT = Active(("drop",), {"Dropout": 1}, 1)


@pytest.mark.parametrize(
    ("fact", "steps", "models"),
    [
        (TrainedInEvaluation, [0], []),  # the step after an evaluation
        (TrainedInEvaluation, [0, 1], ["Net"]),
        (TrainedInEvaluation, [0, 0], []),
        (EvaluatedInTraining, [0], ["Net"]),
    ],
)
def test_training_in_evaluation_mode_is_reported_from_two_steps_on(
    fact: type[EvaluatedInTraining | TrainedInEvaluation], steps: list[int], models: list[str], tmp_path: Path
) -> None:
    run = correctness(tmp_path / "run", *(fact(step, "Net", DROPOUT) for step in steps))
    found = evaluate_rules(run)
    assert [finding.rule for finding in found] == ["module_modes"] * len(models)
    assert [finding.title.split()[0] for finding in found] == models
