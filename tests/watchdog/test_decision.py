"""Diagnosis over all ranks, from written observations, in the order of the formulas."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest

from backlight.processes import ProcessEnd, WaitReason
from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.cause import cause_of
from backlight.watchdog.collectives import CollectiveRecord, Dump
from backlight.watchdog.decision import decide, decide_job
from backlight.watchdog.diagnosis import Cause, What
from backlight.watchdog.observation import ExitReason, IssuedCollectives, Observation, PeerFailure
from backlight.watchdog.shared_state import Collective, RankStatus
from backlight.watchdog.stacks import Frame, ThreadStack, in_collective
from backlight.watchdog.text import Diagnosis, describe
from recorded_observations import LIMITS, TOP, S, observation, samples, snapshot

WORLD = 3
GROUP = 5


def call(
    number: int, kind: int = 1, shape: int = 1, *, inside: bool = False, group: int = GROUP
) -> Collective:
    text = f"call{kind}({shape})"
    return Collective(group, number, kind, shape, 900 * S, 0 if inside else 901 * S, text)


def waiting(rank: int, *calls: Collective, **changes: Any) -> Observation:
    calls = calls or (call(1), call(2, inside=True))
    inside = any(c.inside for c in calls)
    state = snapshot(
        rank=rank, world_size=WORLD, phase=Phase.OTHER, heartbeat=800 * S, phase_since=800 * S, inside=inside,
        collectives=calls, node_since=0,
    )  # fmt: skip
    return observation(state, rank=rank, samples=samples(TOP), **changes)


def diagnose_all(
    *observations: Observation, groups: dict[int, tuple[int, ...]] | None = None
) -> Diagnosis | None:
    members = groups or {GROUP: (0, 1, 2)}
    observed = [dataclasses.replace(o, groups=members) for o in observations]
    causes = {o.rank: cause_of(o, LIMITS, 30.0) for o in observed}
    decision = decide(observed, causes, WORLD)
    return None if decision is None else describe(decision)


def failed(
    rank: int, error: str, at: float = 5.0, inside: PeerFailure = PeerFailure.NONE, **changes: Any
) -> Observation:
    """A rank that an exception ended, in its third backward or after it."""
    one = waiting(rank, call(1), dataclasses.replace(call(2), failed=bool(inside)))
    ended = dataclasses.replace(one.state, status=RankStatus.FAILED, backwards=3)
    kind, _, message = error.partition(": ")
    exit_reason = ExitReason(kind, message, at, "/home/me/train.py:7", "main", inside, **changes)
    return dataclasses.replace(one, snapshots=(ended,), exit_reason=exit_reason)


def finished(rank: int, backwards: int, *calls: Collective) -> Observation:
    state = snapshot(
        rank=rank, world_size=WORLD, status=RankStatus.FINISHED, backwards=backwards, collectives=calls
    )
    return observation(state, rank=rank)


def moving(*heartbeats: int, since: int = 699) -> Observation:
    """Rank 2, which waits for data, with a heartbeat at each of these seconds."""
    readings = tuple(
        snapshot(
            rank=2, world_size=WORLD, heartbeat=at * S, progress=at, phase=Phase.DATA, phase_since=since * S
        )
        for at in heartbeats
    )
    return observation(readings[-1], rank=2, history=readings)


def alone(rank: int, **changes: Any) -> Observation:
    """A rank in no collective."""
    return observation(snapshot(rank=rank, world_size=WORLD), rank=rank, **changes)


def in_backward(rank: int) -> Observation:
    """A rank that waits in native code of backward, as for the reduction of a bucket."""
    state = snapshot(rank=rank, world_size=WORLD, node_since=0)
    return observation(state, rank=rank, samples=samples(*observation().samples[0].threads[0].frames[1:]))


def closed(rank: int, at: float = 5.0) -> Observation:
    """A rank that failed in a collective because of another."""
    return failed(rank, "RuntimeError: Connection closed by peer", at, PeerFailure.COLLECTIVE)


def at_step(one: Observation, step: int) -> Observation:
    return dataclasses.replace(one, snapshots=(dataclasses.replace(one.state, step=step),))


def other_shape(rank: int) -> Observation:
    """A rank that failed in a call of another shape than the others."""
    odd = closed(rank)
    calls = (call(1), dataclasses.replace(call(2, shape=9), failed=True))
    return dataclasses.replace(odd, snapshots=(dataclasses.replace(odd.state, collectives=calls),))


def recorded(one: Observation, operation: str) -> Observation:
    """A rank after three backward passes, whose flight recorder holds an open collective."""
    record = CollectiveRecord("0", (0, 1, 2), 2, operation)
    state = dataclasses.replace(one.state, backwards=3)
    return dataclasses.replace(
        one, snapshots=(state,), issued=IssuedCollectives(dump=Dump(one.rank, (record,)))
    )


TERMINATED, KILLED = ProcessEnd(signal.SIGTERM), ProcessEnd(signal.SIGKILL)
ODD = (call(1), call(2, kind=9, inside=True))
DEAD, MISMATCH, UNKNOWN = DiagnosisKind.DEAD, DiagnosisKind.MISMATCH, DiagnosisKind.UNKNOWN
CASES: dict[str, tuple[list[Observation], DiagnosisKind, int | None, str]] = {
    "a dead rank is the cause": (
        [waiting(0), waiting(1, *ODD, end=KILLED), waiting(2)],
        DEAD, 1, "Waiting for it: rank 0, 2 in call1(1) #2",
    ),
    "of two the first that died": (
        [waiting(0, end=TERMINATED, ended_at=9.0), waiting(1, end=ProcessEnd(), ended_at=3.0)],
        DEAD, 1, "after it rank 0",
    ),
    "not the one that the launcher ended": (
        [
            waiting(0, end=TERMINATED, ended_at=1.0),
            waiting(1, end=ProcessEnd(signal.SIGSEGV), ended_at=1.1),
            waiting(2, end=TERMINATED, ended_at=1.0),
        ],
        DEAD, 1, "killed by SIGSEGV",
    ),
    "a rank outside of collectives": (
        [waiting(0), waiting(1), alone(2, wait=WaitReason.LOCK)],
        DiagnosisKind.BLOCKED, 2, "BLOCKED: rank 2: the main thread waits for a lock in LockedFn",
    ),
    "a moving rank is a straggler": (
        [waiting(0), waiting(1), moving(985, 990, 995, 1000, since=999)],
        DiagnosisKind.SLOW, 2, "straggler, not hung",
    ),
    "a rank that has finished": (
        [waiting(0), waiting(1), finished(2, 9)], DEAD, 2, "has ended its training",
    ),
    "another operation": (
        [waiting(0), waiting(1, *ODD), waiting(2)],
        MISMATCH, 1, "at collective 2 rank 1 calls call9(1), the others call call1(1)",
    ),
    "another shape": (
        [waiting(0), waiting(1, call(1, shape=4), call(2, inside=True)), waiting(2)], MISMATCH, 1, "call1(4)",
    ),
    "no majority names no rank": ([waiting(0), waiting(1, *ODD)], MISMATCH, None, "different operations"),
    "calls that agree": ([waiting(0), waiting(1), waiting(2)], UNKNOWN, None, "undetermined"),
    "least progress is not a cause": (
        [waiting(0), at_step(waiting(1), 1), waiting(2)],
        UNKNOWN, None, "undetermined",
    ),
    "the one in another call than the majority": (
        [waiting(0), in_backward(1), in_backward(2)], MISMATCH, 0,
        "rank 1, 2 has not issued call1(1) #2, in which rank 0 waits; rank 1, 2 wait in a reduction inside ",
    ),
    "a rank that skips a backward, by the flight recorder": (
        [
            recorded(waiting(0), "barrier"),
            *(recorded(in_backward(rank), "all_reduce") for rank in (1, 2)),
        ],
        MISMATCH, 0, "rank 0 is there, with 3 backward passes where the others are at 4",
    ),
    "ranks that are not observed": (
        [waiting(0), waiting(1)], UNKNOWN, None, "1 of 3 ranks are not observable from this machine",
    ),
    "the same by the flight recorder": (
        [recorded(waiting(rank), "all_reduce") for rank in (0, 1)], DiagnosisKind.BLOCKED, None,
        "it does not complete on rank 0, 1; 1 of 3 ranks are not observable from this machine",
    ),
    "a rank that fails by itself": (
        [closed(0, at=5.1), failed(1, "ValueError: injected"), closed(2, at=5.2)], DEAD, 1,
        "DEAD: rank 1 has left its training: ValueError: injected at train.py:7 in main, step 2; "
        "after it rank 0, 2",
    ),
    "a rank out of memory": (
        [waiting(0), failed(1, "MemoryError", out_of_memory=True), waiting(2)],
        DEAD, 1, "has left its training out of memory: MemoryError",
    ),
    "a killed rank, though others failed first": (
        [closed(0), waiting(1, end=KILLED, ended_at=5.3), closed(2)], DEAD, 1, "SIGKILL",
    ),
    "a rank with fewer batches": (
        [closed(0), finished(1, 2, call(1)), closed(2)],
        DEAD, 1, "with 2 backward passes where the others are at 3; rank 0, 2 failed in call1(1) #2",
    ),
    "a rank with an extra call": (
        [finished(0, 3, call(1)), closed(1), finished(2, 3, call(1))],
        MISMATCH, 1, "rank 1 makes a call that rank 0, 2, which have ended, do not make",
    ),
    "failures in a mismatch": (
        [closed(0, at=5.1), other_shape(1), closed(2, at=5.1)],
        MISMATCH, 1, "rank 1 calls call1(9), the others call call1(1)",
    ),
    "failures in calls that agree": (
        [closed(0), closed(1), closed(2)], UNKNOWN, None, "undetermined",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("observations", "kind", "rank", "words"), CASES.values(), ids=list(CASES))
def test_cause(observations: list[Observation], kind: DiagnosisKind, rank: int | None, words: str) -> None:
    found = diagnose_all(*observations)
    assert (found.kind, found.rank) == (kind, rank)
    assert words in found.claim


def test_cause_has_the_line_of_its_own_diagnosis() -> None:
    assert diagnose_all(*CASES["a rank outside of collectives"][0]).line == "/home/me/ops.py:22"
    assert diagnose_all(*CASES["a rank that fails by itself"][0]).line == "/home/me/train.py:7"


@pytest.mark.parametrize(
    "observations",
    [
        *([waiting(0), waiting(1), moving(*at)] for at in [(1000,), (700, 750, 790, 980), (976, 978, 980)]),
        [failed(r, "KeyboardInterrupt", interrupted=r == 2) for r in range(3)],
        [waiting(0), waiting(1), failed(2, "Ray Train", interrupted=True)],
        [failed(r, "ValueError: everywhere") for r in range(3)],
    ],
    ids=[
        "moved once",
        "moved before the others wait",
        "silent since",
        "interrupted",
        "ended by a launcher",
        "error of every rank",
    ],
)
def test_nothing_to_attribute(observations: list[Observation]) -> None:
    assert diagnose_all(*observations) is None


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


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (What.IDLE, "BLOCKED: rank 1: the main thread waits"),
        (What.IN_COLLECTIVE, "BLOCKED: rank 1 waits in "),
    ],
)
def test_rank_is_named_once(what: What, expected: str) -> None:
    alone = Cause(DiagnosisKind.BLOCKED, what, rank=1)
    observations = [observation(snapshot(rank=rank, world_size=2), rank=rank) for rank in range(2)]
    decision = decide(observations, {0: None, 1: alone}, 2)
    assert decision is not None
    assert describe(decision).claim.startswith(expected)


def test_job_of_watched_ranks_is_decided_as_by_their_watchdog() -> None:
    observed = [
        dataclasses.replace(o, groups={GROUP: (0, 1, 2)}) for o in (waiting(0), waiting(1, *ODD), waiting(2))
    ]
    causes = {o.rank: cause_of(o, LIMITS, 30.0) for o in observed}
    live = decide(observed, causes, WORLD)
    assert decide_job(observed, causes, (), frozenset) == live
    assert live is not None
    assert (live.cause.kind, live.cause.rank) == (MISMATCH, 1)
