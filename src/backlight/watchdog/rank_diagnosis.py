"""Diagnosis over all ranks: the rank that is the cause (docs/formulas.md, section 5). No torch.

A pure function of the observations of ranks. The order: failed or dead, outside of every collective, in
another call, the outlier. "Least progress" is never a reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.collective_match import diagnose_collectives
from backlight.watchdog.diagnosis import is_steady
from backlight.watchdog.observation import HIGH, LOW, MEDIUM, Diagnosis, Observation, in_phase
from backlight.watchdog.postmortem import diagnose_failures
from backlight.watchdog.shared_state import Collective, RankStatus

Diagnoses = Mapping[int, Diagnosis | None]
"""The diagnosis of each rank alone; None for one of which there is nothing to report."""

Groups = Mapping[int, Sequence[int]]
"""Ranks of each process group by the checksum that its collectives carry."""

_MOST_SEVERE_FIRST = (
    DiagnosisKind.DEAD,
    DiagnosisKind.STOPPED,
    DiagnosisKind.BLOCKED,
    DiagnosisKind.SPIN,
    DiagnosisKind.LONG_OP,
    DiagnosisKind.PHASE,
    DiagnosisKind.UNKNOWN,
    DiagnosisKind.SLOW,
)


def diagnose_ranks(
    observations: Sequence[Observation], diagnoses: Diagnoses, groups: Groups, world_size: int
) -> Diagnosis | None:
    """Return one diagnosis for all ranks, with the rank that is the cause where that is determined.

    ``observations`` are of the ranks that are observable from here, of ``world_size``.
    """
    if world_size <= 1 or len(observations) == 1:
        alone = [d for d in diagnoses.values() if d is not None]
        if not alone or world_size <= 1:
            return alone[0] if alone else None
        return open_to_unobserved_ranks(_named(alone[0]), observations, world_size)
    if any(o.exit_reason is not None and o.exit_reason.interrupted for o in observations):
        return None  # the user, or a launcher, ends the ranks, one after the other
    failed = diagnose_failures(observations, world_size, lambda: find_mismatch(observations, groups))
    if failed is not None:
        return open_to_unobserved_ranks(failed, observations, world_size)
    waiting = [o for o in observations if (d := diagnoses.get(o.rank)) is not None and d.waits]
    gone = [o for o in observations if o.ended or o.stopped]
    if gone:
        return _gone(gone, waiting, diagnoses, find_mismatch(observations, groups))
    if not waiting:
        found = [d for d in diagnoses.values() if d is not None]
        return _named(max(found, key=_severity)) if found else None
    outside = [o for o in observations if o not in waiting]
    if outside:
        return _outside(outside, waiting, diagnoses)
    found_here = (
        find_mismatch(observations, groups)
        or _compare_issued(observations)
        or _absent(observations, groups)
        or _outlier(observations, diagnoses)
    )
    if found_here is not None:
        return open_to_unobserved_ranks(found_here, observations, world_size)
    first = diagnoses[waiting[0].rank]
    assert first is not None
    undetermined = dataclasses.replace(
        first,
        kind=DiagnosisKind.UNKNOWN,
        rank=None,
        claim="UNKNOWN: all ranks wait, in calls that agree; which rank is the cause is undetermined"
        + _waiting_words(waiting),
        refuted_if="one rank is observed in another call",
        confidence=LOW,
    )
    return open_to_unobserved_ranks(undetermined, observations, world_size)


def open_to_unobserved_ranks(
    diagnosis: Diagnosis, observations: Sequence[Observation], world_size: int
) -> Diagnosis:
    """Leave the cause open where it may be a rank of another machine, which is not observed."""
    if len(observations) >= world_size or not diagnosis.waits:
        return diagnosis
    count = f"{world_size - len(observations)} of {world_size} ranks"
    claim = f"{diagnosis.claim}; {count} are {UNOBSERVED}, so the cause is open"
    return dataclasses.replace(diagnosis, claim=claim, rank=None, confidence=LOW)


UNOBSERVED = "not observable from this machine"
"""Words of a diagnosis that the observations of other machines may explain."""


def _gone(
    gone: Sequence[Observation],
    waiting: Sequence[Observation],
    diagnoses: Diagnoses,
    mismatch: Diagnosis | None,
) -> Diagnosis | None:
    # What a launcher ends is never the first to go.
    first, *later = sorted(gone, key=lambda o: (o.terminated, o.stopped, o.ended_at, o.rank))
    found = diagnoses.get(first.rank)
    if found is None:
        return None
    silent = first.terminated or not first.ended.startswith("killed by")
    if mismatch is not None and (silent or "SIGABRT" in first.ended):
        # The backend gave up on calls that do not fit together: they are the cause, not the first rank to
        # notice.
        claim = f"{mismatch.claim}; rank {first.rank} {first.ended} in it"
        return dataclasses.replace(mismatch, claim=claim)
    after = f"; after it rank {_join(o.rank for o in later)}" if later else ""
    return dataclasses.replace(found, claim=found.claim + after + _waiting_words(waiting))


def _outside(
    outside: Sequence[Observation], waiting: Sequence[Observation], diagnoses: Diagnoses
) -> Diagnosis | None:
    """Diagnose ranks that are in no collective and keep the others waiting.

    None where one of them has neither moved since the others wait, nor been silent for long enough.
    """
    cause = min(outside, key=lambda o: (-_severity(diagnoses.get(o.rank)), o.rank))
    only = cause.rank if len(outside) == 1 else None
    own, state = diagnoses.get(cause.rank), cause.state
    if own is not None and own.kind is not DiagnosisKind.UNKNOWN:
        stalled = [o.rank for o in outside if diagnoses.get(o.rank) is not None]
        return dataclasses.replace(
            own,
            rank=stalled[0] if len(stalled) == 1 else only,
            claim=_named(dataclasses.replace(own, rank=cause.rank)).claim + _waiting_words(waiting),
        )
    if state is not None and state.is_closed:
        how = "has ended its training"
        if state.status is RankStatus.FAILED:
            how = "has left its training with an error"
        return Diagnosis(
            DiagnosisKind.DEAD,
            state.phase,
            f"DEAD: rank {cause.rank} {how} after step {state.step}"
            f"{_fewer_backwards(cause, waiting)}{_waiting_words(waiting)}",
            refuted_if="that rank still takes part",
            next_check="compare the number of batches of the ranks",
            confidence=HIGH,
            rank=only,
        )
    if own is not None:
        claim = _with_rank(own.claim, cause.rank) + _waiting_words(waiting)
        return dataclasses.replace(own, claim=claim, rank=cause.rank)
    since = max((o.state.heartbeat for o in waiting if o.state is not None), default=0)
    if not all(is_steady(o, since) for o in outside if diagnoses.get(o.rank) is None):
        return None
    doing = f"is {in_phase(state.phase)} of step {state.step}" if state is not None else "is not observed"
    return Diagnosis(
        DiagnosisKind.SLOW,
        cause.phase,
        f"SLOW: rank {_join(o.rank for o in outside)} {doing} and moves; it is a straggler, not hung"
        + _waiting_words(waiting),
        refuted_if="that rank never enters the call",
        next_check="compare the phases of that rank with those of the others",
        confidence=MEDIUM,
        rank=only,
    )


def find_mismatch(observations: Sequence[Observation], groups: Groups) -> Diagnosis | None:
    """Find the first collective of a group in which the ranks differ, by operation, shape or dtype."""
    for calls_of, _ in _calls_by_group(observations, groups):
        if len(calls_of) < 2:
            continue
        for number in sorted(set.intersection(*(set(calls) for calls in calls_of.values()))):
            found = {rank: calls[number] for rank, calls in calls_of.items()}
            if len({(c.kind, c.shape) for c in found.values()}) > 1:
                return _mismatch(number, found)
    return None


def _mismatch(number: int, calls: Mapping[int, Collective]) -> Diagnosis:
    ((common, count),) = Counter((c.kind, c.shape) for c in calls.values()).most_common(1)
    odd = sorted(rank for rank, c in calls.items() if (c.kind, c.shape) != common)
    majority = 2 * count > len(calls) and len(odd) == 1
    if majority:
        usual = _without_number(next(c.text for c in calls.values() if (c.kind, c.shape) == common))
        words = f"rank {odd[0]} calls {_without_number(calls[odd[0]].text)}, the others call {usual}"
    else:
        each = "; ".join(f"rank {r} {_without_number(c.text)}" for r, c in sorted(calls.items()))
        words = f"the ranks call different operations: {each}"
    return Diagnosis(
        DiagnosisKind.MISMATCH,
        Phase.OTHER,
        f"MISMATCH: at collective {number} {words}",
        refuted_if="the records of the ranks agree up to this number",
        next_check="compare the branches that the ranks take before this call",
        confidence=HIGH,
        rank=odd[0] if majority else None,
        waits=True,
    )


def _absent(observations: Sequence[Observation], groups: Groups) -> Diagnosis | None:
    """Find a collective in which ranks of its group wait while others have not entered it."""
    for calls_of, expected in _calls_by_group(observations, groups):
        last = {rank: max(calls_of[rank]) if rank in calls_of else 0 for rank in expected}
        waiting = {r: n for r, n in last.items() if r in calls_of and calls_of[r][n].inside}
        if not waiting:
            continue
        newest = max(waiting.values())
        absent = sorted(r for r in last if last[r] < newest)
        if absent:
            inside = sorted(r for r in waiting if waiting[r] == newest)
            return _missing(calls_of[inside[0]][newest], inside, absent, observations)
    return None


def _missing(
    call: Collective, inside: Sequence[int], absent: Sequence[int], observations: Sequence[Observation]
) -> Diagnosis:
    """Diagnose ranks that all wait, some of them in another call: only a majority shows which is right."""
    texts = {
        o.rank: o.state.current_call.text
        for o in observations
        if o.state is not None and o.state.current_call is not None
    }
    fewer, more = (inside, absent) if len(inside) < len(absent) else (absent, inside)
    cause = fewer[0] if len(fewer) == 1 and len(more) > 1 else None
    calls = "; ".join(f"rank {r} waits in {texts.get(r, 'a reduction inside backward')}" for r in absent)
    return Diagnosis(
        DiagnosisKind.MISMATCH,
        Phase.OTHER,
        f"MISMATCH: rank {_join(inside)} waits in {call.text}, which rank {_join(absent)} has not entered: "
        f"{calls}{_behind(cause, observations)}",
        refuted_if="the ranks outside were about to enter that call",
        next_check="look for a call that only some ranks make",
        confidence=MEDIUM if cause is not None else LOW,
        rank=cause,
        waits=True,
    )


def _calls_by_group(
    observations: Sequence[Observation], groups: Groups
) -> list[tuple[dict[int, dict[int, Collective]], list[int]]]:
    """Return, for each group, the calls of its ranks by their number, and its observed ranks."""
    found: dict[int, dict[int, dict[int, Collective]]] = {}
    for obs in observations:
        for call in obs.state.collectives if obs.state is not None else ():
            found.setdefault(call.group, {}).setdefault(obs.rank, {})[call.number] = call
    observed = {obs.rank for obs in observations}
    return [
        (calls_of, [r for r in groups.get(group, calls_of) if r in observed])
        for group, calls_of in found.items()
    ]


def _outlier(observations: Sequence[Observation], diagnoses: Diagnoses) -> Diagnosis | None:
    """Find the one rank that waits in another call than a majority that agrees."""

    def where(obs: Observation) -> str:
        if obs.state is None:
            return "not observed"
        call = obs.state.current_call
        return _without_number(call.text) if call is not None else f"a reduction inside {obs.phase}"

    ((common, count),) = Counter(map(where, observations)).most_common(1)
    odd = [o for o in observations if where(o) != common]
    if len(odd) != 1 or count < 2:
        return None
    own = diagnoses.get(odd[0].rank)
    return Diagnosis(
        DiagnosisKind.MISMATCH,
        odd[0].phase,
        f"MISMATCH: rank {odd[0].rank} waits in {where(odd[0])}, the other {count} wait in {common}",
        refuted_if="the majority is at fault: a call that they all make by mistake",
        next_check="look for a call that only this rank makes, or does not make",
        confidence=MEDIUM,
        rank=odd[0].rank,
        line=own.line if own is not None else None,
        waits=True,
    )


def _compare_issued(observations: Sequence[Observation]) -> Diagnosis | None:
    """Compare what the flight recorders of the ranks hold; None where some rank has none."""
    dumps = {o.rank: dump for o in observations if (dump := o.dump) is not None}
    found = diagnose_collectives(dumps) if len(dumps) == len(observations) else None
    if found is None:
        return None
    return dataclasses.replace(found, claim=found.claim + _behind(found.rank, observations))


def _waiting_words(waiting: Sequence[Observation]) -> str:
    if not waiting:
        return ""
    ranks: dict[str, list[int]] = {}
    for obs in waiting:
        call = obs.state.current_call if obs.state is not None else None
        words = obs.reducing if obs.phase is Phase.BACKWARD else obs.pending or obs.reducing
        ranks.setdefault(call.text if call is not None else words, []).append(obs.rank)
    return ". Waiting for it: " + "; ".join(f"rank {_join(r)} in {call}" for call, r in ranks.items())


def _behind(cause: int | None, observations: Sequence[Observation]) -> str:
    """Return that the rank at fault has made fewer backward passes than those that reduce gradients."""
    reducing = [o for o in observations if o.rank != cause and o.phase is Phase.BACKWARD]
    words = "".join(_fewer_backwards(o, reducing) for o in observations if o.rank == cause)
    return f"; rank {cause} is there{words}" if words else ""


def _fewer_backwards(cause: Observation, others: Sequence[Observation]) -> str:
    reached = [o.backwards + (o.phase is Phase.BACKWARD) for o in others if o.state is not None]
    if cause.state is None or not reached or cause.backwards >= max(reached):
        return ""
    return f", with {cause.backwards} backward passes where the others are at {max(reached)}"


def _named(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of one of several ranks with its rank in words."""
    rank = diagnosis.rank
    if rank is None or re.search(rf"\brank {rank}\b", diagnosis.claim):  # not that of rank 10
        return diagnosis
    return dataclasses.replace(diagnosis, claim=_with_rank(diagnosis.claim, rank))


def _with_rank(claim: str, rank: int) -> str:
    word, colon, rest = claim.partition(":")
    return f"{word}{colon} rank {rank}:{rest}" if colon else f"rank {rank}: {claim}"


def _severity(diagnosis: Diagnosis | None) -> int:
    if diagnosis is None or diagnosis.kind not in _MOST_SEVERE_FIRST:
        return 0
    return len(_MOST_SEVERE_FIRST) - _MOST_SEVERE_FIRST.index(diagnosis.kind)


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _without_number(text: str) -> str:
    return text.split(" #", maxsplit=1)[0]
