"""What evidence supports which verdict; time alone supports none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backlight.diagnose.matrix.evaluation import judge, read_verdicts
from backlight.diagnose.matrix.observations import (
    Ended,
    Observation,
    Place,
    ProcessSeen,
    Progress,
    Stack,
    StallSeen,
    Window,
)
from backlight.records import DiagnosisKind, to_json

LOCK = Place("wait", "/home/me/ops.py", 22)
TOP = Place("<module>", "/home/me/train.py", 9)
NATIVE = Place("PyThread_acquire_lock_timed", "/usr/lib/libpython3.11.so.1.0", 0, native=True)


def dumps(*inner: Place, holds_lock: bool = False, last: tuple[Place, ...] = ()) -> tuple[Stack, ...]:
    found = [
        Stack("py-spy", i, 7, "MainThread", (place, TOP), active=holds_lock, holds_lock=holds_lock, main=True)
        for i, place in enumerate(inner)
    ]
    found[-1] = replace(found[-1], frames=(*last, *found[-1].frames))
    return tuple(found)


def over(
    *,
    cpu: float = 0.0,
    delay: float = 0.0,
    progress: tuple[Progress, ...] = (),
    stacks: tuple[Stack, ...] = (),
    printed: int = 0,
    state: str = "S",
    stalls: tuple[StallSeen, ...] = (),
    seconds: float = 4.0,
) -> Observation:
    return Observation(
        Ended.OVER, 12.0, 12.0, window=Window(seconds, cpu, printed, progress),
        processes=(ProcessSeen(7, 1, "python train.py", state, 1, cpu, delay),), stacks=stacks, stalls=stalls,
    )  # fmt: skip


def steps(before: int, middle: int, after: int, total: int = 0) -> tuple[Progress, ...]:
    return (Progress("said in the output", before, middle, after, total),)


def test_a_wait_without_cpu_on_one_line_is_blocked() -> None:
    said = judge(over(stacks=dumps(LOCK, LOCK, LOCK, last=(NATIVE,))))
    assert (said.verdict, said.line, said.confidence) == (
        DiagnosisKind.BLOCKED,
        "/home/me/ops.py:22",
        "medium",
    )
    assert said.claim == "blocked: thread MainThread waits in wait, ops.py:22 for a lock; CPU 0 % over 2.0 s"
    assert said.alternatives
    assert "3 dumps show the same line (py-spy)" in said.because
    sure = judge(over(stacks=dumps(LOCK, LOCK, LOCK), progress=steps(3, 3, 3)))
    assert (sure.verdict, sure.confidence, sure.alternatives) == (DiagnosisKind.BLOCKED, "high", ())


@pytest.mark.parametrize(
    "seen",
    [
        over(stacks=dumps(LOCK, LOCK), cpu=0.3),
        over(stacks=dumps(LOCK, LOCK), printed=1),
        over(stacks=dumps(LOCK, TOP)),
        over(stacks=dumps(LOCK)),
        over(stacks=dumps(LOCK, LOCK), progress=steps(1, 1, 2)),
        over(stacks=dumps(LOCK, LOCK, LOCK), cpu=1.0),
        over(stacks=dumps(LOCK, TOP, LOCK, holds_lock=True), cpu=1.0),
        over(stacks=dumps(LOCK, LOCK, LOCK, holds_lock=True), cpu=1.0, progress=steps(1, 1, 2)),
        over(stacks=dumps(LOCK, LOCK, LOCK, holds_lock=True), cpu=0.5),
        over(stacks=dumps(LOCK, LOCK, LOCK), delay=0.5),
    ],
)
def test_what_does_not_decide_is_unknown(seen: Observation) -> None:
    said = judge(seen)
    assert said.verdict is DiagnosisKind.UNKNOWN
    assert "did not finish in 12 s" in said.claim
    assert "it is slow and would finish" in said.alternatives


def test_time_alone_says_only_that_it_did_not_finish() -> None:
    for seen in (
        over(),
        over(cpu=1.0),
        over(stacks=dumps(LOCK, LOCK), seconds=0.5),
        replace(over(), window=None),
    ):
        said = judge(seen)
        assert said.verdict is DiagnosisKind.DID_NOT_FINISH
        assert said.claim == "did not finish in 12 seconds"
        assert said.confidence == "none"


def test_a_loop_that_holds_the_interpreter_lock_on_one_line_spins() -> None:
    said = judge(over(stacks=dumps(LOCK, LOCK, LOCK, holds_lock=True), cpu=0.99, progress=steps(3, 3, 3)))
    assert (said.verdict, said.line, said.confidence) == (DiagnosisKind.SPIN, "/home/me/ops.py:22", "high")
    crowded = judge(over(stacks=dumps(LOCK, LOCK, LOCK, holds_lock=True), cpu=0.5, delay=0.45))
    assert crowded.verdict is DiagnosisKind.SPIN
    assert said.claim == "spins in wait, ops.py:22: CPU 99 %, the same line in every dump"


def test_a_native_operation_without_progress_is_a_long_operation() -> None:
    kernel = Place("gemm_kernel", "/site-packages/torch/lib/libtorch_cpu.so", 0, native=True)
    stacks = dumps(LOCK, LOCK, LOCK, last=(kernel,))
    assert judge(over(stacks=stacks, cpu=1.0, progress=steps(3, 3, 3))).verdict is DiagnosisKind.LONG_OP
    # Without a count, one line that calls a kernel is what a training at work looks like.
    assert judge(over(stacks=stacks, cpu=1.0)).verdict is DiagnosisKind.UNKNOWN


def test_progress_in_both_halves_of_the_window_is_slow() -> None:
    said = judge(over(progress=steps(10, 14, 18, 100), stacks=dumps(LOCK, LOCK), cpu=0.0))
    assert said.verdict is DiagnosisKind.SLOW
    assert said.claim == "slow, not hung: 18 of 100 (said in the output), 2/s over the last 4.0 s, ETA 41 s"
    # It moved, and hangs since: that is not slow.
    assert judge(over(progress=steps(10, 14, 14), stacks=dumps(LOCK, LOCK))).verdict is DiagnosisKind.BLOCKED


def test_the_sidecars_finding_is_taken_over_unless_it_is_over() -> None:
    stall = StallSeen(
        "MISMATCH", "ranks differ at sequence 4", phase="backward", line="a.py:3", path="cases/x/000/run"
    )
    said = judge(over(stalls=(stall,), cpu=1.0))
    assert (said.verdict, said.claim, said.phase, said.line) == (
        DiagnosisKind.MISMATCH,
        stall.claim,
        "backward",
        "a.py:3",
    )
    assert "finding of rule stall in cases/x/000/run" in said.because
    assert judge(over(stalls=(replace(stall, over=True),), cpu=1.0)).verdict is DiagnosisKind.DID_NOT_FINISH
    assert judge(over(stalls=(stall,), progress=steps(1, 2, 3))).verdict is DiagnosisKind.SLOW


def test_a_stopped_process_is_stopped() -> None:
    assert judge(over(state="T", stacks=dumps(LOCK, LOCK))).verdict is DiagnosisKind.STOPPED


def test_an_exit_is_judged_by_its_code_and_its_word() -> None:
    done = Observation(Ended.EXITED, 2.0, 12.0, 0)
    assert judge(done).verdict is DiagnosisKind.PASS
    assert judge(replace(done, success=True)).verdict is DiagnosisKind.PASS
    assert judge(replace(done, success=False)).verdict is DiagnosisKind.UNKNOWN
    failed = judge(replace(done, exit_code=1, error="ValueError: injected", error_line="/home/me/a.py:3"))
    assert (failed.verdict, failed.line) == (DiagnosisKind.CRASH, "/home/me/a.py:3")
    assert failed.claim == "left with exit code 1 after 2.0 s: ValueError: injected"
    killed = judge(replace(done, exit_code=-9))
    assert killed.claim == "was ended by SIGKILL after 2.0 s"
    assert killed.alternatives == ("another process killed it (out of memory, a batch system)",)
    assert judge(Observation(Ended.NOT_STARTED, 0.0, 12.0, reason="gone")).verdict is DiagnosisKind.UNKNOWN


def test_an_observation_survives_its_file() -> None:
    seen = over(
        stacks=dumps(LOCK, LOCK, last=(NATIVE,)), progress=steps(1, 2, 3), stalls=(StallSeen("SLOW", "x"),)
    )
    assert Observation.from_json(to_json(seen)) == seen


def test_verdicts_are_read_from_a_list() -> None:
    assert read_verdicts("blocked, CRASH") == (DiagnosisKind.BLOCKED, DiagnosisKind.CRASH)
    with pytest.raises(ValueError, match=r"no verdict is called 'BLOKED'; did you mean 'BLOCKED'\?"):
        read_verdicts("BLOKED")
