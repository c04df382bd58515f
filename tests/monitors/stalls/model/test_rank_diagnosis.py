"""Which rank is the cause, from observations that are written down, in the order of the formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from backlight.monitors.stalls.model.diagnosis import diagnose
from backlight.monitors.stalls.model.exit_reason import ExitReason
from backlight.monitors.stalls.model.observation import Diagnosis, Observation
from backlight.monitors.stalls.model.rank_diagnosis import diagnose_ranks
from backlight.monitors.stalls.model.shared_state import Collective, State
from backlight.monitors.stalls.model.stacks import Frame, ThreadStack, in_collective
from backlight.records import DiagnosisKind, Phase
from monitors.stalls.model.test_diagnosis import LIMITS, TOP, S, board, observation, samples

WORLD = 3
GROUP = 5


def call(
    number: int, kind: int = 1, shape: int = 1, *, inside: bool = False, group: int = GROUP
) -> Collective:
    text = f"call{kind}({shape}) #{number}"
    return Collective(group, number, kind, shape, 900 * S, 0 if inside else 901 * S, text)


def waiting(rank: int, *calls: Collective, **changes: Any) -> Observation:
    calls = calls or (call(1), call(2, inside=True))
    inside = any(c.inside for c in calls)
    state = board(
        rank=rank, world=WORLD, phase=Phase.OTHER, heartbeat=800 * S, phase_since=800 * S, inside=inside,
        collectives=calls, node_since=0,
    )  # fmt: skip
    return observation(state, rank=rank, samples=samples(TOP), **changes)


def decide(*observations: Observation, groups: dict[int, list[int]] | None = None) -> Diagnosis | None:
    diagnoses = {v.rank: diagnose(v, LIMITS, 30.0) for v in observations}
    return diagnose_ranks(observations, diagnoses, groups or {GROUP: [0, 1, 2]}, WORLD)


def test_a_dead_rank_is_the_cause_whatever_the_others_do() -> None:
    found = decide(
        waiting(0), waiting(1, call(1), call(2, kind=9, inside=True), ended="killed by SIGKILL"), waiting(2)
    )
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.DEAD, 1)
    assert "Waiting for it: rank 0, 2 in call1(1) #2" in found.claim


def test_the_first_to_die_is_the_cause() -> None:
    found = decide(
        waiting(0, ended="killed by SIGTERM", ended_at=9.0),
        waiting(1, ended="killed by SIGSEGV", ended_at=3.0),
    )
    assert found is not None
    assert found.rank == 1
    assert "after it rank 0" in found.claim


def test_the_rank_that_is_in_no_collective_is_the_cause() -> None:
    stuck = observation(board(rank=2, world=WORLD), rank=2, wait="a lock")
    found = decide(waiting(0), waiting(1), stuck)
    assert found is not None
    assert (found.kind, found.rank, found.line) == (DiagnosisKind.BLOCKED, 2, "/home/me/ops.py:22")
    assert found.claim.startswith("BLOCKED: rank 2: the main thread waits for a lock")


def test_a_rank_that_moves_is_a_straggler_and_not_hung() -> None:
    readings = tuple(
        board(rank=2, world=WORLD, heartbeat=at * S, progress=at, phase=Phase.DATA, phase_since=999 * S)
        for at in (985, 990, 995, 1000)
    )
    behind = observation(readings[-1], rank=2, history=readings)
    found = decide(waiting(0), waiting(1), behind)
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.SLOW, 2)
    assert "straggler, not hung" in found.claim


@pytest.mark.parametrize("heartbeats", [(1000,), (700, 750, 790, 980), (976, 978, 980)])
def test_a_rank_that_was_not_seen_to_move_since_the_others_wait_is_no_straggler(
    heartbeats: tuple[int, ...],
) -> None:
    readings = tuple(
        board(rank=2, world=WORLD, heartbeat=at * S, progress=at, phase=Phase.DATA, phase_since=699 * S)
        for at in heartbeats
    )
    assert decide(waiting(0), waiting(1), observation(readings[-1], rank=2, history=readings)) is None


def test_a_rank_that_has_ended_is_the_cause() -> None:
    ended = observation(board(rank=2, world=WORLD, state=State.FINISHED, backwards=9, step=9), rank=2)
    found = decide(waiting(0), waiting(1), ended)
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.DEAD, 2)
    assert "has ended its training" in found.claim


def test_another_operation_at_the_same_number_is_a_mismatch() -> None:
    odd = waiting(1, call(1), call(2, kind=9, inside=True))
    found = decide(waiting(0), odd, waiting(2))
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 1)
    assert "at collective 2 rank 1 calls call9(1), the others call call1(1)" in found.claim


def test_another_shape_is_a_mismatch() -> None:
    found = decide(waiting(0), waiting(1, call(1, shape=4), call(2, inside=True)), waiting(2))
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 1)


def test_without_a_majority_no_rank_is_named() -> None:
    found = decide(waiting(0), waiting(1, call(1), call(2, kind=9, inside=True)))
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, None)


def test_calls_that_agree_are_undetermined() -> None:
    found = decide(waiting(0), waiting(1), waiting(2))
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.UNKNOWN, None)
    assert "undetermined" in found.claim


def test_least_progress_is_no_reason() -> None:
    slowest = waiting(1)
    earlier = at_step(slowest, 1)
    found = decide(waiting(0), earlier, waiting(2))
    assert found is not None
    assert found.rank is None


def test_the_outlier_waits_elsewhere_than_the_majority() -> None:
    inside = [
        observation(
            board(rank=r, world=WORLD, node_since=0), rank=r,
            samples=samples(*[f for f in observation().samples[0].threads[0].frames[1:]]),
        )
        for r in (1, 2)
    ]  # fmt: skip
    found = decide(waiting(0), *inside)
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 0)


def test_ranks_of_other_machines_leave_the_cause_open() -> None:
    found = decide(waiting(0), waiting(1))
    assert found is not None
    assert found.rank is None
    assert "1 of 3 ranks are not seen from this machine" in found.claim


def at_step(one: Observation, step: int) -> Observation:
    state = one.board
    assert state is not None
    return dataclasses.replace(one, snapshots=(dataclasses.replace(state, step=step),))


def left_by(rank: int, error: str, at: float = 5.0, inside: str = "", **changes: Any) -> Observation:
    """A rank whose training was left by an exception, in its third backward or after it."""
    one = waiting(rank, call(1), dataclasses.replace(call(2), failed=bool(inside)))
    state = one.board
    assert state is not None
    ended = dataclasses.replace(state, state=State.FAILED, backwards=3)
    exit_reason = ExitReason(error, at, "/home/me/train.py:7", "main", inside, **changes)
    return dataclasses.replace(one, snapshots=(ended,), exit_reason=exit_reason)


def finished(rank: int, backwards: int, *calls: Collective) -> Observation:
    return observation(
        board(rank=rank, world=WORLD, state=State.FINISHED, backwards=backwards, collectives=calls), rank=rank
    )


def test_the_rank_that_fails_by_itself_is_the_cause_and_not_those_that_fail_in_a_collective() -> None:
    closed = "RuntimeError: Connection closed by peer"
    found = decide(
        left_by(0, closed, 5.1, "a collective"),
        left_by(1, "ValueError: injected"),
        left_by(2, closed, 5.2, "a collective"),
    )
    assert found is not None
    assert (found.kind, found.rank, found.line) == (DiagnosisKind.DEAD, 1, "/home/me/train.py:7")
    assert (
        found.claim
        == "DEAD: rank 1 has left its training: ValueError: injected at train.py:7 in main, step 2; "
        "after it rank 0, 2"
    )


def test_a_rank_without_memory_says_so() -> None:
    found = decide(waiting(0), left_by(1, "MemoryError", memory=True), waiting(2))
    assert found is not None
    assert found.rank == 1
    assert "has left its training out of memory: MemoryError" in found.claim


def test_who_was_killed_is_the_cause_though_the_others_failed_first() -> None:
    closed = [left_by(r, "RuntimeError: closed", 5.0, "a collective") for r in (0, 2)]
    killed = waiting(1, ended="killed by SIGKILL", ended_at=5.3)
    found = decide(closed[0], killed, closed[1])
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.DEAD, 1)
    assert "SIGKILL" in found.claim


def test_a_rank_with_fewer_batches_is_the_cause_when_the_others_fail_for_it() -> None:
    closed = [left_by(r, "RuntimeError: closed", 5.0, "a collective") for r in (0, 2)]
    found = decide(closed[0], finished(1, 2, call(1)), closed[1])
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.DEAD, 1)
    assert "with 2 backward passes where the others are at 3; rank 0, 2 failed in call1(1) #2" in found.claim


def test_a_rank_that_makes_one_call_more_is_the_odd_one() -> None:
    found = decide(
        finished(0, 3, call(1)),
        left_by(1, "RuntimeError: closed", 5.0, "a collective"),
        finished(2, 3, call(1)),
    )
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 1)


def test_calls_that_differ_are_the_cause_of_what_failed_in_them() -> None:
    odd = left_by(1, "RuntimeError: closed", 5.0, "a collective")
    state = odd.board
    assert state is not None
    calls = (call(1), dataclasses.replace(call(2, shape=9), failed=True))
    odd = dataclasses.replace(odd, snapshots=(dataclasses.replace(state, collectives=calls),))
    others = [left_by(r, "RuntimeError: read error", 5.1, "a collective") for r in (0, 2)]
    found = decide(others[0], odd, others[1])
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 1)
    assert "rank 1 calls call1(9), the others call call1(1)" in found.claim


def test_what_a_launcher_has_ended_is_never_the_first_to_go() -> None:
    found = decide(
        waiting(0, ended="killed by SIGTERM", ended_at=1.0, terminated=True),
        waiting(1, ended="killed by SIGSEGV", ended_at=1.1),
        waiting(2, ended="killed by SIGTERM", ended_at=1.0, terminated=True),
    )
    assert found is not None
    assert found.rank == 1


def test_nothing_is_said_of_an_interrupt_or_of_an_error_of_every_rank() -> None:
    assert decide(*[left_by(r, "KeyboardInterrupt", asked=r == 2) for r in range(3)]) is None
    assert decide(*[left_by(r, "ValueError: everywhere") for r in range(3)]) is None


def test_failures_without_a_sign_leave_the_cause_open() -> None:
    found = decide(*[left_by(r, "RuntimeError: timed out", 5.0, "a collective") for r in range(3)])
    assert found is not None
    assert (found.kind, found.rank) == (DiagnosisKind.UNKNOWN, None)
    assert "undetermined" in found.claim


def test_a_wait_for_a_functional_collective_is_no_cause() -> None:
    """Tensor parallelism waits through an operator in Python; its user's line stands far outside."""
    torch_at = "/site-packages/torch/"
    inner = (
        ("_ops.py", "OpOverload.redispatch"),
        ("_library/autograd.py", "forward_no_grad"),
        ("_library/autograd.py", "autograd_impl"),
        ("_ops.py", "OpOverloadPacket.__call__"),
        ("distributed/_functional_collectives.py", "wait_tensor"),
        ("autograd/__init__.py", "backward"),
    )
    frames = (*(Frame(torch_at + file, 1, name) for file, name in inner), Frame("/u/train.py", 9, "train"))
    assert in_collective(ThreadStack(1, frames))
    assert not in_collective(ThreadStack(1, (Frame("/u/train.py", 9, "sleep"), *frames)[:1]))
    deep = tuple(Frame("/u/train.py", n, "mine") for n in range(8))
    assert not in_collective(ThreadStack(1, (*deep, *frames)))
