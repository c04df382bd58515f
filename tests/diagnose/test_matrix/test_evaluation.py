"""What evidence supports which verdict (time alone supports none), and whether a factor had an effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backlight import codec
from backlight.diagnose.test_matrix.case_run import CaseObservation, CaseProgress
from backlight.diagnose.test_matrix.evaluation import CaseResult, Effect, Evaluation, compare, evaluate
from backlight.diagnose.test_matrix.plan import Case
from backlight.records import DiagnosisKind, Finding, Fingerprint, Phase, Severity, Subject
from backlight.watchdog.attach import Attached
from backlight.watchdog.text import Diagnosis
from run_builder import build_run

LINE = "/home/me/ops.py:22"


def process(kind: str, claim: str, *, line: str = LINE, **flags: bool) -> Attached:
    found = Diagnosis(DiagnosisKind(kind), Phase.OTHER, f"{kind}: {claim}", "it moves", "", line=line)
    return Attached(7, found, "", (), (), **flags)


IDLE = process("BLOCKED", "the main thread waits for a lock at ops.py:22 in wait", idle=True)
BUSY = process("UNKNOWN", "it computes at ops.py:22 in f")
SPINNING = replace(BUSY, spins=True)
LONG_OP = process("LONG_OP", "in one operation")


def over(
    sample: Attached = IDLE, *progress: CaseProgress, printed: int = 0, stall: Finding | None = None
) -> CaseObservation:
    return CaseObservation(
        12.0, window_s=4.0, output=printed, progress=progress, processes=(sample,), stall=stall
    )


def stall(verdict: str) -> Finding:
    return Finding(
        severity=Severity.ERROR, title="MISMATCH", detail="ranks differ at sequence 4", evidence=(), fix="",
        subject=Subject(verdict=verdict, line="a.py:3"), refuted_if="",
    )  # fmt: skip


def steps(before: int, middle: int, after: int) -> CaseProgress:
    return CaseProgress("in the output", before, middle, after)


def test_a_wait_on_one_line_is_blocked() -> None:
    found = evaluate(over())
    assert (found.verdict, found.line, found.confidence) == (DiagnosisKind.BLOCKED, LINE, "medium")
    assert "waits for a lock at ops.py:22" in found.claim
    assert found.alternatives
    assert evaluate(over(IDLE, steps(3, 3, 3))).confidence == "high"
    # It moved, and is hung since: that is not slow.
    assert evaluate(over(IDLE, steps(10, 14, 14))).verdict is DiagnosisKind.BLOCKED


def test_a_worker_explains_more_than_its_launcher() -> None:
    launcher = process("BLOCKED", "sleeps", line="", idle=True)
    assert evaluate(replace(over(), processes=(launcher, IDLE))).line == LINE


@pytest.mark.parametrize(
    "seen",
    [
        over(replace(IDLE, idle=False)),
        over(printed=1),
        replace(over(), processes=(IDLE, BUSY)),
        over(BUSY),
        over(IDLE, steps(1, 1, 2)),
        over(LONG_OP),
        over(SPINNING, steps(1, 1, 2)),
    ],
)
def test_evidence_that_does_not_decide_is_unknown(seen: CaseObservation) -> None:
    found = evaluate(seen)
    assert found.verdict is DiagnosisKind.UNKNOWN
    assert found.alternatives == ("it is slow", "it hangs")


def test_time_alone_decides_nothing() -> None:
    found = evaluate(replace(over(), processes=()))
    assert (found.verdict, found.confidence) == (DiagnosisKind.DID_NOT_FINISH, "none")
    assert found.claim == "did not finish in 12 seconds"


def test_a_process_that_holds_the_gil_on_one_line_spins() -> None:
    found = evaluate(over(SPINNING, steps(3, 3, 3)))
    assert (found.verdict, found.line, found.confidence) == (DiagnosisKind.SPIN, LINE, "high")
    assert "ops.py:22" in found.claim


def test_a_long_operation_needs_progress_that_does_not_move() -> None:
    assert evaluate(over(LONG_OP, steps(3, 3, 3))).verdict is DiagnosisKind.LONG_OP


def test_progress_in_both_halves_of_the_window_is_slow() -> None:
    found = evaluate(over(IDLE, steps(10, 14, 18)))
    assert found.verdict is DiagnosisKind.SLOW
    assert "10, 14, 18 in the output in 4.0 s" in found.claim


def test_a_stall_finding_is_the_verdict_unless_progress_resumed() -> None:
    stalled = over(BUSY, stall=stall("MISMATCH"))
    found = evaluate(stalled)
    assert (found.verdict, found.line) == (DiagnosisKind.MISMATCH, "a.py:3")
    assert found.claim == "stall finding of the run: MISMATCH; ranks differ at sequence 4"
    assert evaluate(replace(stalled, progress=(steps(1, 2, 3),))).verdict is DiagnosisKind.SLOW


def test_a_stopped_process_is_stopped() -> None:
    assert evaluate(over(process("STOPPED", "is stopped"))).verdict is DiagnosisKind.STOPPED


def test_an_exit_is_evaluated_by_its_code_and_its_output() -> None:
    done = CaseObservation(2.0, 0)
    assert evaluate(done).verdict is DiagnosisKind.PASS
    assert evaluate(replace(done, success=True)).verdict is DiagnosisKind.PASS
    assert evaluate(replace(done, success=False)).verdict is DiagnosisKind.UNKNOWN
    failed = evaluate(replace(done, exit_code=1, error="ValueError: injected", error_line="/home/me/a.py:3"))
    assert (failed.verdict, failed.line) == (DiagnosisKind.CRASH, "/home/me/a.py:3")
    assert "ValueError: injected" in failed.claim
    killed = evaluate(replace(done, exit_code=-9))
    assert (killed.verdict, len(killed.alternatives)) == (DiagnosisKind.CRASH, 1)
    assert "SIGKILL" in killed.claim


def test_an_observation_is_read_back() -> None:
    seen = over(IDLE, steps(1, 2, 3), stall=stall("SLOW"))
    assert codec.convert(codec.plain(seen), CaseObservation) == seen


FINGERPRINT = Fingerprint(
    script="train.py", arguments=("--checkpoint",), modules=(("", "Net"),), parameter_count=10
)


def finished(
    root: Path, name: str, verdict: DiagnosisKind = DiagnosisKind.PASS, *, output: str = "",
    shows: tuple[str, ...] = (), fingerprint: Fingerprint | None = None,
) -> CaseResult:  # fmt: skip
    attempt = root / "cases" / name / "000"
    attempt.mkdir(parents=True)
    (attempt / "stdout.txt").write_text(output)
    (attempt / "stderr.txt").touch()
    if fingerprint is not None:
        build_run(attempt / "run", name=name, fingerprint=fingerprint)
    control = "" if name == "base" else "base"
    case = Case(
        name, ("python", "train.py"), str(root), 10.0, shows=shows, control=control, factor="checkpointing"
    )
    return CaseResult(case, "", f"cases/{name}/000", CaseObservation(1.0, 0), Evaluation(verdict, ""))


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
    runs = {"fingerprint": FINGERPRINT, "output": "done\n"}
    control = finished(tmp_path, "base", **runs)
    # Requested arguments, and times, are no effect.
    other = replace(FINGERPRINT, arguments=(), script="other.py", host="elsewhere")
    found = compare(finished(tmp_path, "other", **{**runs, "fingerprint": other}), control, tmp_path)
    assert (found.outcome, found.effect, found.differences) == ("", Effect.NONE, ())
    assert found.compared == ("the fingerprints of the runs", "the outputs")


def test_a_different_fingerprint_is_an_effect(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", fingerprint=FINGERPRINT)
    changed = replace(FINGERPRINT, flags={"tf32": "True"}, world_size=2)
    found = compare(finished(tmp_path, "other", fingerprint=changed), control, tmp_path)
    assert (found.outcome, found.effect) == ("none", Effect.OBSERVED)
    assert set(found.differences) == {
        "fingerprint flags: {} and {'tf32': 'True'}", "fingerprint world_size: 1 and 2",
    }  # fmt: skip


def test_numbers_may_differ_by_chance(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", output="loss 0.5\n")
    case = finished(tmp_path, "other", output="loss 0.25\n")
    found = compare(case, control, tmp_path)
    assert (found.outcome, found.effect) == ("", Effect.POSSIBLE)
    assert found.differences[0].startswith("output 'loss 0.25' where its control has 'loss 0.5'")
    # A verdict that changed decides more than a number.
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
