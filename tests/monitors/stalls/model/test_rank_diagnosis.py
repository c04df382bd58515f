"""Diagnosis over all ranks, from written observations, in the order of the formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from backlight.monitors.stalls.model.diagnosis import diagnose
from backlight.monitors.stalls.model.observation import Diagnosis, ExitReason, Observation
from backlight.monitors.stalls.model.rank_diagnosis import diagnose_ranks
from backlight.monitors.stalls.model.shared_state import Collective, RankStatus
from backlight.monitors.stalls.model.stacks import Frame, ThreadStack, in_collective
from backlight.records import DiagnosisKind, Phase
from monitors.stalls.model.test_diagnosis import LIMITS, TOP, S, observation, samples, snapshot

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
    state = snapshot(
        rank=rank, world_size=WORLD, phase=Phase.OTHER, heartbeat=800 * S, phase_since=800 * S, inside=inside,
        collectives=calls, node_since=0,
    )  # fmt: skip
    return observation(state, rank=rank, samples=samples(TOP), **changes)


def diagnose_all(*observations: Observation, groups: dict[int, list[int]] | None = None) -> Diagnosis | None:
    diagnoses = {v.rank: diagnose(v, LIMITS, 30.0) for v in observations}
    return diagnose_ranks(observations, diagnoses, groups or {GROUP: [0, 1, 2]}, WORLD)


def test_dead_rank_is_the_cause() -> None:
    found = diagnose_all(
        waiting(0), waiting(1, call(1), call(2, kind=9, inside=True), ended="killed by SIGKILL"), waiting(2)
    )
    assert (found.kind, found.rank) == (DiagnosisKind.DEAD, 1)
    assert "Waiting for it: rank 0, 2 in call1(1) #2" in found.claim


def test_first_dead_rank_is_the_cause() -> None:
    found = diagnose_all(
        waiting(0, ended="killed by SIGTERM", ended_at=9.0),
        waiting(1, ended="killed by SIGSEGV", ended_at=3.0),
    )
    assert found.rank == 1
    assert "after it rank 0" in found.claim


def test_rank_outside_of_collectives_is_the_cause() -> None:
    stuck = observation(snapshot(rank=2, world_size=WORLD), rank=2, wait="a lock")
    found = diagnose_all(waiting(0), waiting(1), stuck)
    assert (found.kind, found.rank, found.line) == (DiagnosisKind.BLOCKED, 2, "/home/me/ops.py:22")
    assert found.claim.startswith("BLOCKED: rank 2: the main thread waits for a lock")


def test_moving_rank_is_a_straggler() -> None:
    readings = tuple(
        snapshot(
            rank=2, world_size=WORLD, heartbeat=at * S, progress=at, phase=Phase.DATA, phase_since=999 * S
        )
        for at in (985, 990, 995, 1000)
    )
    behind = observation(readings[-1], rank=2, history=readings)
    found = diagnose_all(waiting(0), waiting(1), behind)
    assert (found.kind, found.rank) == (DiagnosisKind.SLOW, 2)
    assert "straggler, not hung" in found.claim


@pytest.mark.parametrize("heartbeats", [(1000,), (700, 750, 790, 980), (976, 978, 980)])
def test_rank_that_has_not_moved_since_the_others_wait_is_no_straggler(heartbeats: tuple[int, ...]) -> None:
    readings = tuple(
        snapshot(
            rank=2, world_size=WORLD, heartbeat=at * S, progress=at, phase=Phase.DATA, phase_since=699 * S
        )
        for at in heartbeats
    )
    assert diagnose_all(waiting(0), waiting(1), observation(readings[-1], rank=2, history=readings)) is None


def test_finished_rank_is_the_cause() -> None:
    ended = observation(
        snapshot(rank=2, world_size=WORLD, status=RankStatus.FINISHED, backwards=9, step=9), rank=2
    )
    found = diagnose_all(waiting(0), waiting(1), ended)
    assert (found.kind, found.rank) == (DiagnosisKind.DEAD, 2)
    assert "has ended its training" in found.claim


def test_different_operation_is_a_mismatch() -> None:
    odd = waiting(1, call(1), call(2, kind=9, inside=True))
    found = diagnose_all(waiting(0), odd, waiting(2))
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 1)
    assert "at collective 2 rank 1 calls call9(1), the others call call1(1)" in found.claim


def test_different_shape_is_a_mismatch() -> None:
    found = diagnose_all(waiting(0), waiting(1, call(1, shape=4), call(2, inside=True)), waiting(2))
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 1)


def test_mismatch_without_a_majority_names_no_rank() -> None:
    found = diagnose_all(waiting(0), waiting(1, call(1), call(2, kind=9, inside=True)))
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, None)


def test_agreeing_calls_are_unknown() -> None:
    found = diagnose_all(waiting(0), waiting(1), waiting(2))
    assert (found.kind, found.rank) == (DiagnosisKind.UNKNOWN, None)
    assert "undetermined" in found.claim


def test_least_progress_is_not_a_cause() -> None:
    slowest = waiting(1)
    earlier = at_step(slowest, 1)
    found = diagnose_all(waiting(0), earlier, waiting(2))
    assert found.rank is None


def test_outlier_waits_in_another_call_than_the_majority() -> None:
    inside = [
        observation(
            snapshot(rank=r, world_size=WORLD, node_since=0), rank=r,
            samples=samples(*[f for f in observation().samples[0].threads[0].frames[1:]]),
        )
        for r in (1, 2)
    ]  # fmt: skip
    found = diagnose_all(waiting(0), *inside)
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 0)


def test_unobserved_ranks_leave_the_cause_open() -> None:
    found = diagnose_all(waiting(0), waiting(1))
    assert found.rank is None
    assert "1 of 3 ranks are not observable from this machine" in found.claim


def at_step(one: Observation, step: int) -> Observation:
    state = one.state
    assert state is not None
    return dataclasses.replace(one, snapshots=(dataclasses.replace(state, step=step),))


def failed(rank: int, error: str, at: float = 5.0, inside: str = "", **changes: Any) -> Observation:
    """A rank that an exception ended, in its third backward or after it."""
    one = waiting(rank, call(1), dataclasses.replace(call(2), failed=bool(inside)))
    state = one.state
    assert state is not None
    ended = dataclasses.replace(state, status=RankStatus.FAILED, backwards=3)
    exit_reason = ExitReason(error, at, "/home/me/train.py:7", "main", inside, **changes)
    return dataclasses.replace(one, snapshots=(ended,), exit_reason=exit_reason)


def finished(rank: int, backwards: int, *calls: Collective) -> Observation:
    return observation(
        snapshot(
            rank=rank, world_size=WORLD, status=RankStatus.FINISHED, backwards=backwards, collectives=calls
        ),
        rank=rank,
    )


def test_rank_that_fails_by_itself_is_the_cause() -> None:
    closed = "RuntimeError: Connection closed by peer"
    found = diagnose_all(
        failed(0, closed, 5.1, "a collective"),
        failed(1, "ValueError: injected"),
        failed(2, closed, 5.2, "a collective"),
    )
    assert (found.kind, found.rank, found.line) == (DiagnosisKind.DEAD, 1, "/home/me/train.py:7")
    assert (
        found.claim
        == "DEAD: rank 1 has left its training: ValueError: injected at train.py:7 in main, step 2; "
        "after it rank 0, 2"
    )


def test_rank_out_of_memory_is_the_cause() -> None:
    found = diagnose_all(waiting(0), failed(1, "MemoryError", out_of_memory=True), waiting(2))
    assert found.rank == 1
    assert "has left its training out of memory: MemoryError" in found.claim


def test_killed_rank_is_the_cause_though_others_failed_first() -> None:
    closed = [failed(r, "RuntimeError: closed", 5.0, "a collective") for r in (0, 2)]
    killed = waiting(1, ended="killed by SIGKILL", ended_at=5.3)
    found = diagnose_all(closed[0], killed, closed[1])
    assert (found.kind, found.rank) == (DiagnosisKind.DEAD, 1)
    assert "SIGKILL" in found.claim


def test_rank_with_fewer_batches_is_the_cause() -> None:
    closed = [failed(r, "RuntimeError: closed", 5.0, "a collective") for r in (0, 2)]
    found = diagnose_all(closed[0], finished(1, 2, call(1)), closed[1])
    assert (found.kind, found.rank) == (DiagnosisKind.DEAD, 1)
    assert "with 2 backward passes where the others are at 3; rank 0, 2 failed in call1(1) #2" in found.claim


def test_rank_with_an_extra_call_is_the_cause() -> None:
    found = diagnose_all(
        finished(0, 3, call(1)),
        failed(1, "RuntimeError: closed", 5.0, "a collective"),
        finished(2, 3, call(1)),
    )
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 1)


def test_mismatch_is_the_cause_of_failures_in_it() -> None:
    odd = failed(1, "RuntimeError: closed", 5.0, "a collective")
    state = odd.state
    assert state is not None
    calls = (call(1), dataclasses.replace(call(2, shape=9), failed=True))
    odd = dataclasses.replace(odd, snapshots=(dataclasses.replace(state, collectives=calls),))
    others = [failed(r, "RuntimeError: read error", 5.1, "a collective") for r in (0, 2)]
    found = diagnose_all(others[0], odd, others[1])
    assert (found.kind, found.rank) == (DiagnosisKind.MISMATCH, 1)
    assert "rank 1 calls call1(9), the others call call1(1)" in found.claim


def test_rank_that_the_launcher_ended_is_not_the_cause() -> None:
    found = diagnose_all(
        waiting(0, ended="killed by SIGTERM", ended_at=1.0, terminated=True),
        waiting(1, ended="killed by SIGSEGV", ended_at=1.1),
        waiting(2, ended="killed by SIGTERM", ended_at=1.0, terminated=True),
    )
    assert found.rank == 1


def test_interrupt_or_error_of_every_rank_has_no_diagnosis() -> None:
    assert diagnose_all(*[failed(r, "KeyboardInterrupt", interrupted=r == 2) for r in range(3)]) is None
    assert diagnose_all(*[failed(r, "ValueError: everywhere") for r in range(3)]) is None


def test_failures_in_an_agreeing_collective_are_unknown() -> None:
    found = diagnose_all(*[failed(r, "RuntimeError: timed out", 5.0, "a collective") for r in range(3)])
    assert (found.kind, found.rank) == (DiagnosisKind.UNKNOWN, None)
    assert "undetermined" in found.claim


def test_wait_in_a_functional_collective_is_recognised() -> None:
    """Tensor parallelism waits through an operator in Python; the user's line lies far outside."""
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
