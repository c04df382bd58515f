"""Recorded collectives compared across ranks: what differs, and which rank the others wait for. No torch.

Of ranks that wait for each other the chain is followed to the rank that waits in none, or around a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.collective_waits import (
    Disagreement,
    Mismatch,
    Wait,
    compared_dtypes,
    compared_sizes,
    find_mismatches,
    find_waits,
)
from backlight.watchdog.flight_recorder import CollectiveRecord, Dump
from backlight.watchdog.observation import HIGH, LOW, MEDIUM, Diagnosis
from backlight.watchdog.point_to_point import find_open_pairs, find_unlike_pairs


def diagnose_collectives(dumps: Mapping[int, Dump]) -> Diagnosis | None:
    """Return what recorded collectives show of ranks that make no progress, None where all have completed."""
    mismatch = next(chain(find_mismatches(dumps), find_unlike_pairs(dumps)), None)
    if mismatch is not None:
        return _mismatch(mismatch)
    found = chain(find_waits(dumps), find_open_pairs(dumps))
    waits = sorted(found, key=lambda wait: min(c.created_ns for c in wait.inside.values()))
    if not waits:
        return None
    return _cycle(waits) or _absent(waits) or _all_inside(next(w for w in waits if not w.absent))


def _mismatch(found: Mismatch) -> Diagnosis:
    def words(call: CollectiveRecord) -> str:
        return f"{call.operation}({call.tensors}){call.peer_words}"

    def part(call: CollectiveRecord) -> object:
        return {
            Disagreement.OPERATION: call.operation,
            Disagreement.SIZES: compared_sizes(call),
            Disagreement.DTYPES: compared_dtypes(call),
        }[found.kind]

    ((common, count),) = Counter(map(part, found.calls.values())).most_common(1)
    odd = [rank for rank, call in found.calls.items() if part(call) != common]
    first = next(iter(found.calls.values()))
    at = f"{'collective' if first.peer is None else first.operation} {first.number}{first.group_words}"
    if len(odd) == 1 and count > 1:
        usual = next(c for c in found.calls.values() if part(c) == common)
        own = words(found.calls[odd[0]])
        claim = f"MISMATCH: at {at} rank {odd[0]} calls {own}, the others call {words(usual)}"
        line = found.calls[odd[0]].line
    else:
        each = "; ".join(f"rank {r} {words(c)}" for r, c in sorted(found.calls.items())[:8])
        claim, line = f"MISMATCH: at {at} the {found.kind.value} of the ranks differ: {each}", ""
    return Diagnosis(
        DiagnosisKind.MISMATCH,
        Phase.OTHER,
        f"{claim}{f'; issued at {line}' if line else ''}",
        refuted_if="the records of the ranks agree up to this number",
        next_check="compare the branches that the ranks take before this call",
        confidence=HIGH,
        rank=odd[0] if len(odd) == 1 and count > 1 else None,
        line=line or None,
        waits=True,
    )


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


_ORDER = "make all ranks issue the collectives of these groups in the same order"

_PAIRED_ORDER = "let one of the ranks receive before it sends, or put both calls into one `batch_isend_irecv`"


def _cycle(waits: Sequence[Wait]) -> Diagnosis | None:
    """Find ranks that wait for each other, in different groups or under different numbers of a group."""
    first: dict[int, Wait] = {}
    for wait in waits:
        for rank in wait.inside:
            first.setdefault(rank, wait)
    for start in waits:
        path = [start]
        while (after := _next_wait(path[-1], first)) is not None and after not in path:
            path.append(after)
        if after is None:
            continue
        ring = path[path.index(after) :]
        waiting = [(wait, sorted(r for r in wait.inside if first[r] is wait)) for wait in ring]
        fewest, most = (pick(waiting, key=lambda pair: len(pair[1])) for pick in (min, max))
        cause = fewest[1][0] if len(fewest[1]) == 1 < len(most[1]) else None
        parts = [
            f"rank {_join(ranks)} {_waits(ranks)} in {wait.inside[ranks[0]].text}" for wait, ranks in waiting
        ]
        return Diagnosis(
            DiagnosisKind.MISMATCH,
            Phase.OTHER,
            f"MISMATCH: ranks wait for each other: {'; '.join(parts)}",
            refuted_if="one of these collectives completes",
            next_check=_ORDER if ring[0].call.peer is None else _PAIRED_ORDER,
            confidence=MEDIUM if cause is not None else LOW,
            rank=cause,
            waits=True,
        )
    return None


def _next_wait(wait: Wait, first: Mapping[int, Wait]) -> Wait | None:
    """Return the other collective in which a rank waits that ``wait`` lacks."""
    return next((first[r] for r in wait.absent if r in first and first[r] is not wait), None)


def _waits(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _absent(waits: Sequence[Wait]) -> Diagnosis | None:
    """Find the ranks that have not issued a collective in which others wait, and wait in none themselves."""
    inside = {rank for wait in waits for rank in wait.inside}
    found = [wait for wait in waits if wait.absent and not wait.is_queued]
    if not found:
        return None
    wait = next((w for w in found if not inside.issuperset(w.absent)), found[0])
    absent = [r for r in wait.absent if r not in inside] or list(wait.absent)
    only = absent[0] if len(absent) == 1 else None
    last = wait.last.get(only) if only is not None else None
    after = ""
    if only is not None:
        after = f"; its last one there is {last.text}" if last is not None else "; it has issued none there"
        after += f" at {last.line}" if last is not None and last.line else ""
    elsewhere = [w.inside[only].text for w in waits if only in w.inside] if only is not None else []
    after += f"; it waits in {elsewhere[0]}" if elsewhere else ""
    line = wait.call.line
    kind = DiagnosisKind.MISMATCH if elsewhere else DiagnosisKind.BLOCKED
    return Diagnosis(
        kind,
        Phase.OTHER,
        f"{kind}: rank {_join(absent)} has not issued {wait.missing}, in which "
        f"rank {_join(list(wait.inside))} {_waits(list(wait.inside))}"
        f"{wait.call.issued}{after}",
        refuted_if="that rank was about to issue it",
        next_check="look for what keeps that rank from this call: `backlight attach PID` on it",
        confidence=MEDIUM,
        rank=only,
        line=line or None,
        waits=True,
    )


def _all_inside(wait: Wait) -> Diagnosis:
    """Diagnose a collective that every rank has issued and that does not complete."""
    late = sorted(r for r, c in wait.inside.items() if not c.started)
    if late and len(late) < len(wait.inside):
        words = (
            f"rank {_join(late)} has issued {wait.call.text}, and its device has not started it, while "
            f"that of rank {_join([r for r in wait.inside if r not in late])} waits in it{wait.call.issued}"
        )
        next_check = (
            "find out what the device of that rank computes: earlier kernels of its stream do not end"
        )
    else:
        ranks = _join(list(wait.inside))
        words = f"all observed ranks have issued {wait.call.text}; it does not complete on rank {ranks}"
        words += wait.call.issued
        next_check = "check the network and the devices between these ranks; the calls of the ranks agree"
    return Diagnosis(
        DiagnosisKind.BLOCKED,
        Phase.OTHER,
        f"BLOCKED: {words}",
        refuted_if="the collective completes by itself",
        next_check=next_check,
        confidence=MEDIUM if late and len(late) < len(wait.inside) else LOW,
        rank=late[0] if len(late) == 1 and len(wait.inside) > 1 else None,
        waits=True,
    )
