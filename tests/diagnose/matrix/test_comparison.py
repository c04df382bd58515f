"""A case against its control: a knob that moved nothing clears nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backlight.diagnose.matrix.case_run import stalls_of, steps_at
from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.comparison import Effect, Seen, compare
from backlight.diagnose.matrix.directory import Attempt
from backlight.diagnose.matrix.evaluation import Judgement
from backlight.diagnose.matrix.launch_spec import Launch
from backlight.diagnose.matrix.observations import Ended, Observation
from backlight.records import DiagnosisKind, Fingerprint
from backlight.store.write.writer import RunWriter

FINGERPRINT = Fingerprint(
    script="train.py", arguments=("--checkpoint",), modules=(("", "Net"),), parameter_count=10
)


def seen(
    root: Path, name: str, verdict: DiagnosisKind = DiagnosisKind.PASS, *, output: str = "",
    shows: tuple[str, ...] = (), fingerprint: Fingerprint | None = None, losses: tuple[float, ...] = (),
) -> Seen:  # fmt: skip
    attempt = Attempt(root, root / "cases" / name / "000")
    attempt.path.mkdir(parents=True)
    attempt.stdout.write_text(output)
    if fingerprint is not None:
        writer = RunWriter.create(attempt.run, name=name)
        writer.fingerprint(fingerprint)
        for step, loss in enumerate(losses):
            writer.scalars(step, {"loss": loss, "time": 100.0 + step, "cost": 0.1 * (1 + len(name))})
        writer.close()
    launch = Launch(("python", "train.py"), str(root), 10.0, {})
    case = Case(name, launch, "" if name == "base" else "base", "checkpointing", shows=shows)
    return Seen(
        case, attempt, Observation(Ended.EXITED, 1.0, 10.0, 0), Judgement(verdict, "", "high", (), "")
    )


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
    control = seen(tmp_path, "base", DiagnosisKind(before), output="checkpointing off\n")
    case = seen(tmp_path, "knob", DiagnosisKind(after), output="checkpointing on\n")
    said = compare(case, control)
    assert (said.outcome, said.effect) == (outcome, Effect.SEEN)
    assert f"({before} -> {after})" in said.claim


def test_without_an_effect_the_factor_is_not_cleared(tmp_path: Path) -> None:
    runs = {"fingerprint": FINGERPRINT, "losses": (1.0, 0.5), "output": "done\n"}
    control = seen(tmp_path, "base", **runs)
    # Arguments as they were asked for, and times, are no effect.
    other = replace(FINGERPRINT, arguments=(), script="other.py", host="elsewhere")
    case = seen(tmp_path, "knob", **{**runs, "fingerprint": other})
    said = compare(case, control)
    assert (said.outcome, said.effect, said.seen) == ("", Effect.NONE, ())
    assert said.why == (
        "the knob had no effect that shows in the fingerprints and first steps of the runs, the outputs"
    )


def test_a_fingerprint_that_differs_is_an_effect(tmp_path: Path) -> None:
    control = seen(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0,))
    case = seen(tmp_path, "knob", fingerprint=replace(FINGERPRINT, flags={"tf32": "True"}, world_size=2))
    said = compare(case, control)
    assert (said.outcome, said.effect) == ("none", Effect.SEEN)
    assert said.seen == ("fingerprint flags: tf32 none and True", "fingerprint world_size: 1 and 2")


def test_losses_that_differ_may_differ_by_chance(tmp_path: Path) -> None:
    control = seen(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0, 0.5))
    case = seen(tmp_path, "knob", fingerprint=FINGERPRINT, losses=(1.0, 0.25))
    said = compare(case, control)
    assert (said.outcome, said.effect) == ("", Effect.PERHAPS)
    assert said.seen == ("loss at step 1: 0.5 and 0.25 (chance, where training is not seeded)",)
    # A verdict that changed with the knob says more than a loss.
    assert (
        compare(
            replace(case, judgement=replace(case.judgement, verdict=DiagnosisKind.CRASH)), control
        ).outcome
        == "causes"
    )


def test_what_the_plan_says_it_shows_decides(tmp_path: Path) -> None:
    control = seen(tmp_path, "base", output="checkpointing: off\n")
    case = seen(tmp_path, "knob", output="checkpointing: off\n", shows=("checkpointing: on",))
    said = compare(case, control)
    assert (said.effect, said.outcome) == (Effect.NONE, "")
    assert said.why == "the knob had no effect that shows in its output, which lacks 'checkpointing: on'"
    (tmp_path / "other").mkdir()
    case = seen(tmp_path / "other", "knob", output="checkpointing: on\n", shows=("checkpointing: on",))
    assert compare(case, control).outcome == "none"


def test_what_was_cut_short_may_still_differ(tmp_path: Path) -> None:
    control = seen(tmp_path, "base", DiagnosisKind.BLOCKED, output="starting\nst")
    case = seen(tmp_path, "knob", DiagnosisKind.BLOCKED, output="starting\n")
    said = compare(case, control)
    assert (said.effect, said.outcome) == (Effect.NOT_OBSERVED, "")
    assert "shows = " in said.why


@pytest.mark.parametrize("verdict", [DiagnosisKind.UNKNOWN, DiagnosisKind.DID_NOT_FINISH])
def test_an_undecided_verdict_decides_nothing(verdict: DiagnosisKind, tmp_path: Path) -> None:
    control = seen(tmp_path, "base", output="off\n")
    case = seen(tmp_path, "knob", verdict, output="on\n")
    assert compare(case, control).outcome == ""
    assert compare(case, control).why == f"the verdict of the case is {verdict.value}"
    assert compare(replace(control, case=case.case), replace(case, case=control.case)).outcome == ""


def test_steps_count_by_the_time_that_the_training_stamped(tmp_path: Path) -> None:
    one = seen(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0, 0.5, 0.25))
    assert steps_at(one.attempt.run, [99.0, 100.0, 101.5, 200.0]) == (0, 1, 2, 3)
    assert steps_at(tmp_path, [1.0]) is None
    assert stalls_of(one.attempt.run, tmp_path) == ()
