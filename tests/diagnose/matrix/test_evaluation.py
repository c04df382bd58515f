"""What evidence supports which verdict (time alone supports none)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from backlight.diagnose.matrix.evaluation import evaluate, read_verdicts
from backlight.diagnose.matrix.observation import Observation, ProcessSample, Progress
from backlight.records import DiagnosisKind, Finding, Severity, Subject

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
    stalls: tuple[Finding, ...] = (),
) -> Observation:
    return Observation(
        12.0, 12.0, window_s=seconds, output_bytes=printed, progress=progress, processes=(sample,),
        stalls=stalls,
    )  # fmt: skip


def stall(verdict: str) -> Finding:
    return Finding(
        severity=Severity.ERROR, title="", detail="ranks differ at sequence 4", evidence=(), fix="",
        subject=Subject(verdict=verdict, line="a.py:3"), refuted_if="",
    )  # fmt: skip


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
        replace(over(), window_s=0.0),
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
    stalled = over(BUSY, stalls=(stall("MISMATCH"),))
    found = evaluate(stalled)
    assert (found.verdict, found.line) == (DiagnosisKind.MISMATCH, "a.py:3")
    assert found.because[0] == "finding of rule stall in the run directory"
    assert evaluate(replace(stalled, resumed=True)).verdict is DiagnosisKind.UNKNOWN
    assert evaluate(replace(stalled, progress=(steps(1, 2, 3),))).verdict is DiagnosisKind.SLOW


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
    seen = over(IDLE, steps(1, 2, 3), stalls=(stall("SLOW"),))
    assert observations.validate_json(observations.dump_json(seen)) == seen


def test_verdicts_are_read_from_a_list() -> None:
    assert read_verdicts("blocked, CRASH") == (DiagnosisKind.BLOCKED, DiagnosisKind.CRASH)
    with pytest.raises(ValueError, match=r"no verdict is called 'BLOKED'; did you mean 'BLOCKED'\?"):
        read_verdicts("BLOKED")
