"""Which rank is the cause: dead, not in a collective, in another call, the outlier; else undetermined.

A pure function of what was observed of every rank of this machine. The order is that of the formulas of this
monitor; "least progress" is never a reason.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from backlight.monitors.stalls.model.diagnosis import is_steady
from backlight.monitors.stalls.model.observation import HIGH, LOW, MEDIUM, Diagnosis, Observation, in_phase
from backlight.monitors.stalls.model.postmortem import diagnose_failures
from backlight.monitors.stalls.model.shared_state import Collective, State
from backlight.records import DiagnosisKind, Phase


def diagnose_ranks(
    observations: Sequence[Observation],
    diagnoses: Mapping[int, Diagnosis | None],
    groups: Mapping[int, Sequence[int]],
    world: int,
) -> Diagnosis | None:
    """Return one verdict for all ranks, with the rank that is the cause where that can be told.

    Parameters
    ----------
    views:
        What was observed of each rank that can be seen.
    judged:
        The verdict on each alone; None for one of which there is nothing to say.
    groups:
        Ranks of each group by the key that collectives carry.
    world:
        Number of ranks of the training, seen or not.
    """
    if world <= 1 or len(observations) == 1:
        alone = [j for j in diagnoses.values() if j is not None]
        return mark_unobserved_ranks(alone[0], observations, world) if alone else None
    left = diagnose_failures(observations, world, lambda: find_mismatch(observations, groups))
    if left is not None:
        return mark_unobserved_ranks(left, observations, world)
    waiting = [v for v in observations if (j := diagnoses.get(v.rank)) is not None and j.waits]
    gone = [v for v in observations if v.ended or v.stopped]
    if gone:
        return _gone(gone, waiting, diagnoses, observations, groups)
    if not waiting:
        found = [j for j in diagnoses.values() if j is not None]
        return max(found, key=_weight) if found else None
    outside = [v for v in observations if v not in waiting]
    if outside:
        return _outside(outside, waiting, diagnoses)
    terminated = (
        find_mismatch(observations, groups)
        or _absent(observations, groups)
        or _outlier(observations, diagnoses)
    )
    if terminated is not None:
        return terminated
    return mark_unobserved_ranks(
        _undetermined(waiting, diagnoses, "all ranks wait, in calls that agree"), observations, world
    )


def _gone(
    gone: Sequence[Observation],
    waiting: Sequence[Observation],
    diagnoses: Mapping[int, Diagnosis | None],
    observations: Sequence[Observation],
    groups: Mapping[int, Sequence[int]],
) -> Diagnosis | None:
    # What a launcher ends is never the first to go.
    killed = sorted(gone, key=lambda v: (v.terminated, v.stopped, v.ended_at, v.rank))
    first = diagnoses.get(killed[0].rank)
    if first is None:
        return None
    differ = find_mismatch(observations, groups)
    silent = killed[0].terminated or not killed[0].ended.startswith("killed by")
    if differ is not None and (silent or "SIGABRT" in killed[0].ended):
        # The backend gave up on calls that do not fit together: they are the cause, not who noticed first.
        return dataclasses.replace(
            differ, claim=f"{differ.claim}; rank {killed[0].rank} {killed[0].ended} in it"
        )
    more = f"; after it rank {', '.join(str(v.rank) for v in killed[1:])}" if len(killed) > 1 else ""
    return dataclasses.replace(first, claim=first.claim + more + _others(waiting))


def _outside(
    outside: Sequence[Observation], waiting: Sequence[Observation], diagnoses: Mapping[int, Diagnosis | None]
) -> Diagnosis | None:
    """The ranks that are in no collective keep the others waiting.

    None where one of them was not seen to move since the others wait, nor to stand still for long enough.
    """
    by_weight = sorted(outside, key=lambda v: (-_weight(diagnoses.get(v.rank)), v.rank))
    cause = by_weight[0]
    own = diagnoses.get(cause.rank)
    board = cause.board
    if own is not None and own.kind is not DiagnosisKind.UNKNOWN:
        claim = own.claim if f"rank {cause.rank}" in own.claim else _with_rank(own.claim, cause.rank)
        return dataclasses.replace(
            own,
            rank=cause.rank if len(outside) == 1 else _single(outside, diagnoses),
            claim=claim + _others(waiting),
        )
    if board is not None and board.state in {State.FINISHED, State.FAILED}:
        how = (
            "has ended its training"
            if board.state is State.FINISHED
            else "has left its training with an error"
        )
        behind = _backwards(outside[:1], waiting)
        return Diagnosis(
            DiagnosisKind.DEAD,
            board.phase,
            f"DEAD: rank {cause.rank} {how} after step {board.step}{behind}{_others(waiting)}",
            refuted_if="that rank still takes part",
            next_check="compare the number of batches of the ranks",
            confidence=HIGH,
            rank=cause.rank if len(outside) == 1 else None,
        )
    doing = f"is {in_phase(board.phase)} of step {board.step}" if board is not None else "is not seen"
    if own is not None:
        return dataclasses.replace(
            own, claim=_with_rank(own.claim, cause.rank) + _others(waiting), rank=cause.rank
        )
    since = max((v.board.heartbeat for v in waiting if v.board is not None), default=0)
    if not all(is_steady(v, since) for v in outside if diagnoses.get(v.rank) is None):
        return None
    names = ", ".join(str(v.rank) for v in outside)
    return Diagnosis(
        DiagnosisKind.SLOW,
        board.phase if board is not None else Phase.OTHER,
        f"SLOW: rank {names} {doing} and moves; it is a straggler, not hung{_others(waiting)}",
        refuted_if="that rank never enters the call",
        next_check="compare the phases of that rank with those of the others",
        confidence=MEDIUM,
        rank=cause.rank if len(outside) == 1 else None,
    )


def find_mismatch(
    observations: Sequence[Observation], groups: Mapping[int, Sequence[int]]
) -> Diagnosis | None:
    """Find the first collective of a group in which the ranks differ, by operation, shape or type."""
    for ranks, _ in _by_group(observations, groups):
        if len(ranks) < 2:
            continue
        for number in sorted(set.intersection(*(set(calls) for calls in ranks.values()))):
            found = {rank: calls[number] for rank, calls in ranks.items()}
            if len({(c.kind, c.shape) for c in found.values()}) > 1:
                return _mismatch(number, found)
    return None


def _absent(observations: Sequence[Observation], groups: Mapping[int, Sequence[int]]) -> Diagnosis | None:
    """Find a collective in which ranks of its group wait while others have not entered it."""
    for ranks, expected in _by_group(observations, groups):
        last = {rank: max(ranks[rank]) if rank in ranks else 0 for rank in expected}
        stuck = {r: n for r, n in last.items() if r in ranks and ranks[r][n].inside}
        absent = sorted(r for r in last if stuck and last[r] < max(stuck.values()))
        if stuck and absent:
            call = ranks[max(stuck, key=lambda r: stuck[r])][max(stuck.values())]
            return _missing(
                call, sorted(r for r in stuck if stuck[r] == max(stuck.values())), absent, observations
            )
    return None


def _by_group(
    observations: Sequence[Observation], groups: Mapping[int, Sequence[int]]
) -> list[tuple[dict[int, dict[int, Collective]], list[int]]]:
    """Return, for each group, the calls of its ranks by their number, and its ranks that are seen here."""
    found: dict[int, dict[int, dict[int, Collective]]] = {}
    for observation in observations:
        for call in observation.board.collectives if observation.board is not None else ():
            found.setdefault(call.group, {}).setdefault(observation.rank, {})[call.number] = call
    seen = {observation.rank for observation in observations}
    return [(ranks, [r for r in groups.get(group, ranks) if r in seen]) for group, ranks in found.items()]


def _mismatch(number: int, found: Mapping[int, Collective]) -> Diagnosis:
    kinds = Counter((c.kind, c.shape) for c in found.values())
    (common, count), *_ = kinds.most_common()
    odd = sorted(r for r, c in found.items() if (c.kind, c.shape) != common)
    majority = 2 * count > len(found) and len(odd) == 1
    said = _bare(next(c.text for c in found.values() if (c.kind, c.shape) == common))
    other = _bare(found[odd[0]].text)
    if majority:
        claim = f"MISMATCH: at collective {number} rank {odd[0]} calls {other}, the others call {said}"
    else:
        claim = f"MISMATCH: at collective {number} the ranks call different things: " + "; ".join(
            f"rank {r} {_bare(c.text)}" for r, c in sorted(found.items())
        )
    return Diagnosis(
        DiagnosisKind.MISMATCH,
        Phase.OTHER,
        claim,
        refuted_if="the records of the ranks agree up to this number",
        next_check="compare the branches that the ranks take before this call",
        confidence=HIGH,
        rank=odd[0] if majority else None,
        waits=True,
    )


def _missing(
    call: Collective, inside: Sequence[int], absent: Sequence[int], observations: Sequence[Observation]
) -> Diagnosis:
    """All ranks wait, some of them in another call: who is right is only told by a majority."""
    where = {
        v.rank: v.board.current_call.text
        for v in observations
        if v.board is not None and v.board.current_call is not None
    }
    alone, rest = (inside, absent) if len(inside) < len(absent) else (absent, inside)
    cause = alone[0] if len(alone) == 1 and len(rest) > 1 else None
    odd = [v for v in observations if v.rank == cause]
    reducing = [v for v in observations if v.board is not None and v.board.phase is Phase.BACKWARD]
    fewer = _backwards(odd, [v for v in reducing if v.rank != cause])
    behind = f"; rank {cause} is there{fewer}" if fewer else ""
    elsewhere = "; ".join(f"rank {r} waits in {where.get(r, 'a reduction inside backward')}" for r in absent)
    return Diagnosis(
        DiagnosisKind.MISMATCH,
        Phase.OTHER,
        f"MISMATCH: rank {', '.join(map(str, inside))} waits in {call.text}, which rank "
        f"{', '.join(map(str, absent))} has not entered: {elsewhere}{behind}",
        refuted_if="the ranks outside were about to enter that call",
        next_check="look for a call that only some ranks make",
        confidence=MEDIUM if cause is not None else LOW,
        rank=cause,
        waits=True,
    )


def _outlier(
    observations: Sequence[Observation], diagnoses: Mapping[int, Diagnosis | None]
) -> Diagnosis | None:
    """One rank waits elsewhere than a majority that agrees."""

    def where(observation: Observation) -> str:
        board = observation.board
        if board is None:
            return "unseen"
        return (
            _bare(board.current_call.text)
            if board.current_call is not None
            else f"a reduction inside {board.phase}"
        )

    counts = Counter(where(v) for v in observations)
    (common, count), *_ = counts.most_common()
    odd = [v for v in observations if where(v) != common]
    if len(odd) != 1 or count < 2:
        return None
    one = odd[0]
    own = diagnoses.get(one.rank)
    return Diagnosis(
        DiagnosisKind.MISMATCH,
        one.board.phase if one.board is not None else Phase.OTHER,
        f"MISMATCH: rank {one.rank} waits in {where(one)}, the other {count} wait in {common}",
        refuted_if="the majority is what is wrong: a call that they all make by mistake",
        next_check="look for a call that only this rank makes, or does not make",
        confidence=MEDIUM,
        rank=one.rank,
        line=own.line if own is not None else None,
        waits=True,
    )


def _undetermined(
    waiting: Sequence[Observation], diagnoses: Mapping[int, Diagnosis | None], why: str
) -> Diagnosis:
    first = diagnoses[waiting[0].rank]
    assert first is not None
    return dataclasses.replace(
        first,
        kind=DiagnosisKind.UNKNOWN,
        rank=None,
        claim=f"UNKNOWN: {why}; which rank is the cause is undetermined{_others(waiting)}",
        refuted_if="one rank is seen to be elsewhere",
        confidence=LOW,
    )


def mark_unobserved_ranks(diagnosis: Diagnosis, observations: Sequence[Observation], world: int) -> Diagnosis:
    """Leave the cause open where ranks of other machines, which are not seen, may be it."""
    if len(observations) >= world or not diagnosis.waits:
        return diagnosis
    unseen = f"{world - len(observations)} of {world} ranks are not seen from this machine"
    claim = f"{diagnosis.claim}; {unseen}, so that the cause is open"
    return dataclasses.replace(diagnosis, claim=claim, rank=None, confidence=LOW)


def _others(waiting: Sequence[Observation]) -> str:
    if not waiting:
        return ""
    calls: dict[str, list[int]] = {}
    for observation in waiting:
        board = observation.board
        call = board.current_call if board is not None else None
        what = call.text if call is not None else observation.reducing
        calls.setdefault(what, []).append(observation.rank)
    said = "; ".join(f"rank {', '.join(map(str, ranks))} in {what}" for what, ranks in calls.items())
    return f". Waiting for it: {said}"


def _backwards(cause: Sequence[Observation], waiting: Sequence[Observation]) -> str:
    mine = cause[0].board.backwards if cause and cause[0].board is not None else None
    theirs = [v.board.backwards + (v.board.phase is Phase.BACKWARD) for v in waiting if v.board is not None]
    if mine is None or not theirs or mine >= max(theirs):
        return ""
    return f", with {mine} backward passes where the others are at {max(theirs)}"


def _single(outside: Sequence[Observation], diagnoses: Mapping[int, Diagnosis | None]) -> int | None:
    stuck = [v.rank for v in outside if diagnoses.get(v.rank) is not None]
    return stuck[0] if len(stuck) == 1 else None


def _with_rank(claim: str, rank: int) -> str:
    word, colon, rest = claim.partition(":")
    return f"{word}{colon} rank {rank}:{rest}" if colon else f"rank {rank}: {claim}"


def _weight(diagnosis: Diagnosis | None) -> int:
    order = (
        DiagnosisKind.DEAD, DiagnosisKind.STOPPED, DiagnosisKind.BLOCKED, DiagnosisKind.SPIN,
        DiagnosisKind.LONG_OP, DiagnosisKind.PHASE, DiagnosisKind.UNKNOWN, DiagnosisKind.SLOW,
    )  # fmt: skip
    if diagnosis is None or diagnosis.kind not in order:
        return 0
    return len(order) - order.index(diagnosis.kind)


def _bare(text: str) -> str:
    return text.split(" #", maxsplit=1)[0]
