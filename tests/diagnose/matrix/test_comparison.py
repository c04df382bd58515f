"""A case against its control: the effect of its factor, and the outcome."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.comparison import CaseResult, Effect, compare
from backlight.diagnose.matrix.evaluation import Evaluation
from backlight.diagnose.matrix.observation import Observation, read_stalls, steps_at
from backlight.records import DiagnosisKind, Fingerprint
from backlight.store.write.writer import RunWriter

FINGERPRINT = Fingerprint(
    script="train.py", arguments=("--checkpoint",), modules=(("", "Net"),), parameter_count=10
)


def finished(
    root: Path, name: str, verdict: DiagnosisKind = DiagnosisKind.PASS, *, output: str = "",
    shows: tuple[str, ...] = (), fingerprint: Fingerprint | None = None, losses: tuple[float, ...] = (),
) -> CaseResult:  # fmt: skip
    attempt = root / "cases" / name / "000"
    attempt.mkdir(parents=True)
    (attempt / "stdout.txt").write_text(output)
    if fingerprint is not None:
        writer = RunWriter.create(attempt / "run", name=name)
        writer.fingerprint(fingerprint)
        for step, loss in enumerate(losses):
            writer.scalars(step, {"loss": loss, "time": 100.0 + step, "cost": 0.1 * (1 + len(name))})
        writer.close()
    control = "" if name == "base" else "base"
    case = Case(
        name, ("python", "train.py"), str(root), 10.0, shows=shows, control=control, factor="checkpointing"
    )
    return CaseResult(case, f"cases/{name}/000", Observation(1.0, 10.0, 0), Evaluation(verdict, ""))


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("PASS", "BLOCKED", "causes"),
        ("SPIN", "PASS", "cures"),
        ("BLOCKED", "CRASH", "changes"),
        ("SLOW", "SLOW", "none"),
    ],
)
def test_the_outcome_follows_the_two_verdicts(before: str, after: str, outcome: str, tmp_path: Path) -> None:
    control = finished(tmp_path, "base", DiagnosisKind(before), output="checkpointing off\n")
    case = finished(tmp_path, "other", DiagnosisKind(after), output="checkpointing on\n")
    found = compare(case, control, tmp_path)
    assert (found.outcome, found.effect) == (outcome, Effect.OBSERVED)
    assert f"({before} -> {after})" in found.claim


def test_without_an_effect_the_factor_is_not_cleared(tmp_path: Path) -> None:
    runs = {"fingerprint": FINGERPRINT, "losses": (1.0, 0.5), "output": "done\n"}
    control = finished(tmp_path, "base", **runs)
    # Requested arguments, and times, are no effect.
    other = replace(FINGERPRINT, arguments=(), script="other.py", host="elsewhere")
    found = compare(finished(tmp_path, "other", **{**runs, "fingerprint": other}), control, tmp_path)
    assert (found.outcome, found.effect, found.differences) == ("", Effect.NONE, ())
    assert found.compared == ("the fingerprints and first steps of the runs", "the outputs")


def test_a_different_fingerprint_is_an_effect(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0,))
    changed = replace(FINGERPRINT, flags={"tf32": "True"}, world_size=2)
    found = compare(finished(tmp_path, "other", fingerprint=changed), control, tmp_path)
    assert (found.outcome, found.effect) == ("none", Effect.OBSERVED)
    assert set(found.differences) == {
        "fingerprint flags: tf32 none and True", "fingerprint world_size: 1 and 2",
    }  # fmt: skip


def test_losses_may_differ_by_chance(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0, 0.5))
    case = finished(tmp_path, "other", fingerprint=FINGERPRINT, losses=(1.0, 0.25))
    found = compare(case, control, tmp_path)
    assert (found.outcome, found.effect) == ("", Effect.POSSIBLE)
    assert found.differences[0].startswith("loss at step 1: 0.5 and 0.25")
    # A verdict that changed decides more than a loss.
    crashed = replace(case, evaluation=Evaluation(DiagnosisKind.CRASH, ""))
    assert compare(crashed, control, tmp_path).outcome == "causes"


def test_the_declared_output_decides(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", output="checkpointing: off\n")
    case = finished(tmp_path, "other", output="checkpointing: off\n", shows=("checkpointing: on",))
    found = compare(case, control, tmp_path)
    assert (found.effect, found.outcome) == (Effect.NONE, "")
    assert "lacks 'checkpointing: on'" in found.why
    case = finished(tmp_path, "third", output="checkpointing: on\n", shows=("checkpointing: on",))
    assert compare(case, control, tmp_path).outcome == "none"


def test_cases_that_were_cut_short_may_still_differ(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", DiagnosisKind.BLOCKED, output="starting\nst")
    found = compare(
        finished(tmp_path, "other", DiagnosisKind.BLOCKED, output="starting\n"), control, tmp_path
    )
    assert (found.effect, found.outcome) == (Effect.UNKNOWN, "")
    assert "shows = " in found.why


@pytest.mark.parametrize("verdict", [DiagnosisKind.UNKNOWN, DiagnosisKind.DID_NOT_FINISH])
def test_an_undecided_verdict_decides_nothing(verdict: DiagnosisKind, tmp_path: Path) -> None:
    control = finished(tmp_path, "base", output="off\n")
    case = finished(tmp_path, "other", verdict, output="on\n")
    found = compare(case, control, tmp_path)
    assert (found.outcome, found.why) == ("", f"the verdict of the case is {verdict.value}")
    swapped = replace(control, case=case.case), replace(case, case=control.case)
    assert compare(*swapped, tmp_path).outcome == ""


def test_steps_count_by_the_recorded_times(tmp_path: Path) -> None:
    one = finished(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0, 0.5, 0.25))
    run = tmp_path / one.attempt / "run"
    assert steps_at(run, [99.0, 100.0, 101.5, 200.0]) == (0, 1, 2, 3)
    assert steps_at(tmp_path, [1.0]) is None
    assert read_stalls(run) == ((), False)
