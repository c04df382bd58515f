"""Which rank is the cause, from observations that are written down, in the order of the formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

from backlight.records import Phase, Verdict
from backlight.stalls.board import Collective, State
from backlight.stalls.ranks import attribute
from backlight.stalls.verdict import Judgement, View, judge
from stalls.test_verdict import LIMITS, TOP, S, board, looks, view

WORLD = 3
GROUP = 5


def call(
    number: int, kind: int = 1, shape: int = 1, *, inside: bool = False, group: int = GROUP
) -> Collective:
    text = f"call{kind}({shape}) #{number}"
    return Collective(group, number, kind, shape, 900 * S, 0 if inside else 901 * S, text)


def waiting(rank: int, *calls: Collective, **changes: Any) -> View:
    calls = calls or (call(1), call(2, inside=True))
    inside = any(c.inside for c in calls)
    state = board(
        rank=rank, world=WORLD, phase=Phase.OTHER, beat=800 * S, phase_since=800 * S, inside=inside,
        collectives=calls, node_since=0,
    )  # fmt: skip
    return view(state, rank=rank, looks=looks(TOP), **changes)


def decide(*views: View, groups: dict[int, list[int]] | None = None) -> Judgement | None:
    judged = {v.rank: judge(v, LIMITS, 30.0) for v in views}
    return attribute(views, judged, groups or {GROUP: [0, 1, 2]}, WORLD)


def test_a_dead_rank_is_the_cause_whatever_the_others_do() -> None:
    found = decide(
        waiting(0), waiting(1, call(1), call(2, kind=9, inside=True), ended="killed by SIGKILL"), waiting(2)
    )
    assert found is not None
    assert (found.verdict, found.rank) == (Verdict.DEAD, 1)
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
    stuck = view(board(rank=2, world=WORLD), rank=2, wait="a lock")
    found = decide(waiting(0), waiting(1), stuck)
    assert found is not None
    assert (found.verdict, found.rank, found.line) == (Verdict.BLOCKED, 2, "/home/me/ops.py:22")
    assert found.claim.startswith("BLOCKED: rank 2: the main thread waits for a lock")


def test_a_rank_that_moves_is_a_straggler_and_not_hung() -> None:
    behind = view(board(rank=2, world=WORLD, beat=1000 * S, phase=Phase.DATA, phase_since=999 * S), rank=2)
    found = decide(waiting(0), waiting(1), behind)
    assert found is not None
    assert (found.verdict, found.rank) == (Verdict.SLOW, 2)
    assert "straggler, not hung" in found.claim


def test_a_rank_that_has_ended_is_the_cause() -> None:
    ended = view(board(rank=2, world=WORLD, state=State.FINISHED, backwards=9, step=9), rank=2)
    found = decide(waiting(0), waiting(1), ended)
    assert found is not None
    assert (found.verdict, found.rank) == (Verdict.DEAD, 2)
    assert "has ended its training" in found.claim


def test_another_operation_at_the_same_number_is_a_mismatch() -> None:
    odd = waiting(1, call(1), call(2, kind=9, inside=True))
    found = decide(waiting(0), odd, waiting(2))
    assert found is not None
    assert (found.verdict, found.rank) == (Verdict.MISMATCH, 1)
    assert "at collective 2 rank 1 calls call9(1), the others call call1(1)" in found.claim


def test_another_shape_is_a_mismatch() -> None:
    found = decide(waiting(0), waiting(1, call(1, shape=4), call(2, inside=True)), waiting(2))
    assert found is not None
    assert (found.verdict, found.rank) == (Verdict.MISMATCH, 1)


def test_without_a_majority_no_rank_is_named() -> None:
    found = decide(waiting(0), waiting(1, call(1), call(2, kind=9, inside=True)))
    assert found is not None
    assert (found.verdict, found.rank) == (Verdict.MISMATCH, None)


def test_calls_that_agree_are_undetermined() -> None:
    found = decide(waiting(0), waiting(1), waiting(2))
    assert found is not None
    assert (found.verdict, found.rank) == (Verdict.UNKNOWN, None)
    assert "undetermined" in found.claim


def test_least_progress_is_no_reason() -> None:
    slowest = waiting(1)
    earlier = at_step(slowest, 1)
    found = decide(waiting(0), earlier, waiting(2))
    assert found is not None
    assert found.rank is None


def test_the_outlier_waits_elsewhere_than_the_majority() -> None:
    inside = [
        view(
            board(rank=r, world=WORLD, node_since=0), rank=r,
            looks=looks(*[f for f in view().looks[0].threads[0].frames[1:]]),
        )
        for r in (1, 2)
    ]  # fmt: skip
    found = decide(waiting(0), *inside)
    assert found is not None
    assert (found.verdict, found.rank) == (Verdict.MISMATCH, 0)


def test_ranks_of_other_machines_leave_the_cause_open() -> None:
    found = decide(waiting(0), waiting(1))
    assert found is not None
    assert found.rank is None
    assert "1 of 3 ranks are not seen from this machine" in found.claim


def at_step(one: View, step: int) -> View:
    state = one.board
    assert state is not None
    return dataclasses.replace(one, boards=(dataclasses.replace(state, step=step),))
