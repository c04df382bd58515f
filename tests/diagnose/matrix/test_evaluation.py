"""What evidence supports which verdict (time alone supports none), and a case against its control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from backlight.diagnose.matrix.case_run import read_stalls, steps_at
from backlight.diagnose.matrix.cases import Case, Launch
from backlight.diagnose.matrix.evaluation import (
    Effect,
    Evaluation,
    Finished,
    compare,
    evaluate,
    read_verdicts,
)
from backlight.diagnose.matrix.results import Attempt, Observation, ProcessSample, Progress, Stall, Window
from backlight.records import DiagnosisKind, Fingerprint
from backlight.store.write.writer import RunWriter

LINE = "/home/me/ops.py:22"
IDLE = ProcessSample(
    7, "python train.py", True, 0.0, verdict=DiagnosisKind.BLOCKED, line=LINE,
    claim="the main thread waits for a lock at ops.py:22 in wait",
)  # fmt: skip
BUSY = replace(IDLE, cpu=1.0, verdict=DiagnosisKind.UNKNOWN, claim="it computes at ops.py:22 in f")
SPINNING = replace(BUSY, spins=True)


def over(
    sample: ProcessSample = IDLE,
    *progress: Progress,
    printed: int = 0,
    seconds: float = 4.0,
    stalls: tuple[Stall, ...] = (),
) -> Observation:
    window = Window(seconds, sample.cpu, printed, progress)
    return Observation(12.0, 12.0, window=window, processes=(sample,), stalls=stalls)


def steps(before: int, middle: int, after: int, total: int = 0) -> Progress:
    return Progress("in the output", before, middle, after, total)


def test_a_wait_without_cpu_on_one_line_is_blocked() -> None:
    found = evaluate(over())
    assert (found.verdict, found.line, found.confidence) == (DiagnosisKind.BLOCKED, LINE, "medium")
    assert "waits for a lock at ops.py:22" in found.claim
    assert found.alternatives
    sure = evaluate(over(IDLE, steps(3, 3, 3)))
    assert (sure.verdict, sure.confidence, sure.alternatives) == (DiagnosisKind.BLOCKED, "high", ())


def test_a_worker_explains_more_than_its_launcher() -> None:
    launcher = replace(IDLE, pid=3, leaf=False, line="/lib/api.py:1")
    assert evaluate(replace(over(), processes=(launcher, IDLE))).line == LINE


@pytest.mark.parametrize(
    "seen",
    [
        over(replace(IDLE, cpu=0.3)),
        over(replace(IDLE, delay=0.5)),
        over(printed=1),
        over(replace(IDLE, verdict=DiagnosisKind.UNKNOWN)),
        over(IDLE, steps(1, 1, 2)),
        over(BUSY),
        over(replace(BUSY, verdict=DiagnosisKind.LONG_OP)),
        over(SPINNING, steps(1, 1, 2)),
        over(replace(SPINNING, cpu=0.5)),
    ],
)
def test_evidence_that_does_not_decide_is_unknown(seen: Observation) -> None:
    found = evaluate(seen)
    assert found.verdict is DiagnosisKind.UNKNOWN
    assert "it is slow and would finish" in found.alternatives


def test_time_alone_decides_nothing() -> None:
    for seen in (
        over(replace(IDLE, verdict=DiagnosisKind.UNKNOWN, claim="")),
        over(replace(BUSY, claim="")),
        over(seconds=0.5),
        replace(over(), window=None),
    ):
        found = evaluate(seen)
        assert (found.verdict, found.confidence) == (DiagnosisKind.DID_NOT_FINISH, "none")


def test_a_process_that_holds_the_gil_on_one_line_spins() -> None:
    found = evaluate(over(SPINNING, steps(3, 3, 3)))
    assert (found.verdict, found.line, found.confidence) == (DiagnosisKind.SPIN, LINE, "high")
    # On a crowded machine it queues for a core for part of the time.
    assert evaluate(over(replace(SPINNING, cpu=0.5, delay=0.45))).verdict is DiagnosisKind.SPIN


def test_a_long_operation_needs_progress_that_does_not_move() -> None:
    assert (
        evaluate(over(replace(BUSY, verdict=DiagnosisKind.LONG_OP), steps(3, 3, 3))).verdict
        is DiagnosisKind.LONG_OP
    )


def test_progress_in_both_halves_of_the_window_is_slow() -> None:
    found = evaluate(over(IDLE, steps(10, 14, 18, 100)))
    assert found.verdict is DiagnosisKind.SLOW
    assert "18 of 100" in found.claim
    assert "2/s over the last 4.0 s, ETA 41 s" in found.claim
    # It moved, and is hung since: that is not slow.
    assert evaluate(over(IDLE, steps(10, 14, 14))).verdict is DiagnosisKind.BLOCKED


def test_a_stall_finding_is_the_verdict_unless_progress_resumed() -> None:
    stall = Stall("MISMATCH", "ranks differ at sequence 4", "backward", "a.py:3", path="cases/x/000/run")
    found = evaluate(over(BUSY, stalls=(stall,)))
    assert (found.verdict, found.phase, found.line) == (DiagnosisKind.MISMATCH, "backward", "a.py:3")
    assert found.because[0] == "finding of rule stall in cases/x/000/run"
    assert evaluate(over(BUSY, stalls=(replace(stall, over=True),))).verdict is DiagnosisKind.UNKNOWN
    assert evaluate(over(BUSY, steps(1, 2, 3), stalls=(stall,))).verdict is DiagnosisKind.SLOW


def test_a_stopped_process_is_stopped() -> None:
    assert evaluate(over(replace(IDLE, verdict=DiagnosisKind.STOPPED))).verdict is DiagnosisKind.STOPPED


def test_an_exit_is_evaluated_by_its_code_and_its_output() -> None:
    done = Observation(2.0, 12.0, 0)
    assert evaluate(done).verdict is DiagnosisKind.PASS
    assert evaluate(replace(done, success=True)).verdict is DiagnosisKind.PASS
    assert evaluate(replace(done, success=False)).verdict is DiagnosisKind.UNKNOWN
    failed = evaluate(replace(done, exit_code=1, error="ValueError: injected", error_line="/home/me/a.py:3"))
    assert (failed.verdict, failed.line) == (DiagnosisKind.CRASH, "/home/me/a.py:3")
    assert "ValueError: injected" in failed.claim
    killed = evaluate(replace(done, exit_code=-9))
    assert (killed.verdict, len(killed.alternatives)) == (DiagnosisKind.CRASH, 1)
    assert "SIGKILL" in killed.claim
    assert evaluate(Observation(0.0, 12.0, problem="gone")).verdict is DiagnosisKind.UNKNOWN


def test_an_observation_is_read_back() -> None:
    observations = TypeAdapter(Observation)
    seen = over(IDLE, steps(1, 2, 3), stalls=(Stall("SLOW", "x"),))
    assert observations.validate_json(observations.dump_json(seen)) == seen


def test_verdicts_are_read_from_a_list() -> None:
    assert read_verdicts("blocked, CRASH") == (DiagnosisKind.BLOCKED, DiagnosisKind.CRASH)
    with pytest.raises(ValueError, match=r"no verdict is called 'BLOKED'; did you mean 'BLOCKED'\?"):
        read_verdicts("BLOKED")


FINGERPRINT = Fingerprint(
    script="train.py", arguments=("--checkpoint",), modules=(("", "Net"),), parameter_count=10
)


def finished(
    root: Path, name: str, verdict: DiagnosisKind = DiagnosisKind.PASS, *, output: str = "",
    shows: tuple[str, ...] = (), fingerprint: Fingerprint | None = None, losses: tuple[float, ...] = (),
) -> Finished:  # fmt: skip
    attempt = Attempt(root, root / "cases" / name / "000")
    attempt.path.mkdir(parents=True)
    attempt.outputs[0].write_text(output)
    if fingerprint is not None:
        writer = RunWriter.create(attempt.run, name=name)
        writer.fingerprint(fingerprint)
        for step, loss in enumerate(losses):
            writer.scalars(step, {"loss": loss, "time": 100.0 + step, "cost": 0.1 * (1 + len(name))})
        writer.close()
    launch = Launch(("python", "train.py"), str(root), 10.0)
    case = Case(name, launch, "" if name == "base" else "base", "checkpointing", shows=shows)
    return Finished(case, attempt, Observation(1.0, 10.0, 0), Evaluation(verdict, ""))


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
    found = compare(case, control)
    assert (found.outcome, found.effect) == (outcome, Effect.OBSERVED)
    assert f"({before} -> {after})" in found.claim


def test_without_an_effect_the_factor_is_not_cleared(tmp_path: Path) -> None:
    runs = {"fingerprint": FINGERPRINT, "losses": (1.0, 0.5), "output": "done\n"}
    control = finished(tmp_path, "base", **runs)
    # Requested arguments, and times, are no effect.
    other = replace(FINGERPRINT, arguments=(), script="other.py", host="elsewhere")
    found = compare(finished(tmp_path, "other", **{**runs, "fingerprint": other}), control)
    assert (found.outcome, found.effect, found.differences) == ("", Effect.NONE, ())
    assert found.compared == ("the fingerprints and first steps of the runs", "the outputs")


def test_a_different_fingerprint_is_an_effect(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0,))
    changed = replace(FINGERPRINT, flags={"tf32": "True"}, world_size=2)
    found = compare(finished(tmp_path, "other", fingerprint=changed), control)
    assert (found.outcome, found.effect) == ("none", Effect.OBSERVED)
    assert set(found.differences) == {
        "fingerprint flags: tf32 none and True", "fingerprint world_size: 1 and 2",
    }  # fmt: skip


def test_losses_may_differ_by_chance(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0, 0.5))
    case = finished(tmp_path, "other", fingerprint=FINGERPRINT, losses=(1.0, 0.25))
    found = compare(case, control)
    assert (found.outcome, found.effect) == ("", Effect.POSSIBLE)
    assert found.differences[0].startswith("loss at step 1: 0.5 and 0.25")
    # A verdict that changed decides more than a loss.
    crashed = replace(case, evaluation=Evaluation(DiagnosisKind.CRASH, ""))
    assert compare(crashed, control).outcome == "causes"


def test_the_declared_output_decides(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", output="checkpointing: off\n")
    case = finished(tmp_path, "other", output="checkpointing: off\n", shows=("checkpointing: on",))
    found = compare(case, control)
    assert (found.effect, found.outcome) == (Effect.NONE, "")
    assert "lacks 'checkpointing: on'" in found.why
    case = finished(tmp_path, "third", output="checkpointing: on\n", shows=("checkpointing: on",))
    assert compare(case, control).outcome == "none"


def test_cases_that_were_cut_short_may_still_differ(tmp_path: Path) -> None:
    control = finished(tmp_path, "base", DiagnosisKind.BLOCKED, output="starting\nst")
    found = compare(finished(tmp_path, "other", DiagnosisKind.BLOCKED, output="starting\n"), control)
    assert (found.effect, found.outcome) == (Effect.UNKNOWN, "")
    assert "shows = " in found.why


@pytest.mark.parametrize("verdict", [DiagnosisKind.UNKNOWN, DiagnosisKind.DID_NOT_FINISH])
def test_an_undecided_verdict_decides_nothing(verdict: DiagnosisKind, tmp_path: Path) -> None:
    control = finished(tmp_path, "base", output="off\n")
    case = finished(tmp_path, "other", verdict, output="on\n")
    assert compare(case, control).outcome == ""
    assert compare(case, control).why == f"the verdict of the case is {verdict.value}"
    assert compare(replace(control, case=case.case), replace(case, case=control.case)).outcome == ""


def test_steps_count_by_the_recorded_times(tmp_path: Path) -> None:
    one = finished(tmp_path, "base", fingerprint=FINGERPRINT, losses=(1.0, 0.5, 0.25))
    assert steps_at(one.attempt.run, [99.0, 100.0, 101.5, 200.0]) == (0, 1, 2, 3)
    assert steps_at(tmp_path, [1.0]) is None
    assert read_stalls(one.attempt.run, "run") == ()
