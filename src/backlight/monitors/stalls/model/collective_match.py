"""Recorded collectives compared across ranks: what differs, and which rank the others wait for. No torch.

Collectives of one group are matched by their number. Of ranks that wait for each other the chain is followed
to the rank that waits in none, or around a cycle.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backlight.monitors.stalls.model.flight_recorder import CollectiveRecord, Dump
from backlight.monitors.stalls.model.observation import HIGH, LOW, MEDIUM, Diagnosis
from backlight.records import DiagnosisKind, Phase

Calls = dict[int, tuple[CollectiveRecord, ...]]
"""The collectives of one rank in one group by number; coalesced ones share a number."""


class Disagreement(enum.Enum):
    """How collectives of one number differ."""

    OPERATION = "operation"
    SIZES = "sizes"
    DTYPES = "dtypes"


@dataclass(frozen=True)
class Mismatch:
    """A collective in which ranks differ."""

    kind: Disagreement
    calls: Mapping[int, CollectiveRecord]


@dataclass(frozen=True)
class Wait:
    """A collective that has not completed: ranks that have issued it, and those that have not."""

    call: CollectiveRecord  # of the first rank in it
    inside: Mapping[int, CollectiveRecord]
    absent: tuple[int, ...]
    last: Mapping[int, CollectiveRecord | None] = field(default_factory=dict)  # of each absent rank, in it


def _by_group(dumps: Mapping[int, Dump]) -> dict[tuple[str, tuple[int, ...]], dict[int, Calls]]:
    found: dict[tuple[str, tuple[int, ...]], dict[int, Calls]] = {}
    for rank, dump in dumps.items():
        for record in dump.records:
            if record.is_point_to_point:
                continue
            calls = found.setdefault((record.group, record.ranks), {}).setdefault(rank, {})
            if calls and record.number < max(calls):
                calls.clear()  # the group was destroyed and made again
            calls[record.number] = (*calls.get(record.number, ()), record)
    return found


def _members(
    key: tuple[str, tuple[int, ...]], calls_of: Mapping[int, Calls], dumps: Mapping[int, Dump]
) -> list[int]:
    """Return the observed ranks of a group, without those whose buffer may have lost its calls there."""
    ranks = key[1] or tuple(calls_of)
    return [r for r in ranks if r in dumps and (r in calls_of or dumps[r].is_whole)]


def find_mismatches(dumps: Mapping[int, Dump]) -> Iterator[Mismatch]:
    """Yield the first collective of each group in which ranks differ."""
    for calls_of in _by_group(dumps).values():
        common = set.intersection(*(set(calls) for calls in calls_of.values()))
        for number in sorted(common) if len(calls_of) > 1 else ():
            # The oldest number of a buffer may have lost its first part.
            if any(number == min(calls) and not dumps[rank].is_whole for rank, calls in calls_of.items()):
                continue
            found = _differ({rank: calls[number] for rank, calls in calls_of.items()})
            if found is not None:
                yield found
                break


def _differ(calls: Mapping[int, Sequence[CollectiveRecord]]) -> Mismatch | None:
    """Compare what ranks have issued under one number."""
    if len({len(found) for found in calls.values()}) > 1:
        return Mismatch(Disagreement.OPERATION, {rank: found[-1] for rank, found in calls.items()})
    for at in range(len(next(iter(calls.values())))):
        column = {rank: found[at] for rank, found in calls.items()}
        for kind, part in (
            (Disagreement.OPERATION, lambda c: c.operation),
            (Disagreement.SIZES, _compared_sizes),
            (Disagreement.DTYPES, _compared_dtypes),
        ):
            if len({part(c) for c in column.values()}) > 1:
                return Mismatch(kind, column)
    return None


def _compares_inputs(operation: str) -> bool:
    return not operation.startswith(("all_to_all", "scatter", "broadcast"))  # only the root has some


def _compares_outputs(operation: str) -> bool:
    return not operation.startswith(("all_to_all", "gather"))


def _compared_sizes(call: CollectiveRecord) -> object:
    return (
        call.inputs if _compares_inputs(call.operation) else None,
        call.outputs if _compares_outputs(call.operation) else None,
    )


def _compared_dtypes(call: CollectiveRecord) -> object:
    inputs, outputs = call.dtypes
    return (
        inputs if _compares_inputs(call.operation) and any(call.inputs) else None,
        outputs if _compares_outputs(call.operation) and any(call.outputs) else None,
    )


def find_waits(dumps: Mapping[int, Dump]) -> Iterator[Wait]:
    """Yield, for each group, the first collective that has not completed where it was issued."""
    for key, calls_of in _by_group(dumps).items():
        members = _members(key, calls_of, dumps)
        numbers = sorted({n for calls in calls_of.values() for n in calls})
        newest = {rank: max(calls) for rank, calls in calls_of.items()}
        for number in numbers:
            inside = {
                rank: calls[number][-1]
                for rank, calls in calls_of.items()
                if number in calls and not all(c.completed for c in calls[number])
            }
            if not inside:
                continue
            absent = tuple(r for r in members if newest.get(r, 0) < number)
            last = {r: calls_of[r][newest[r]][-1] if r in newest else None for r in absent}
            yield Wait(next(iter(inside.values())), inside, absent, last)
            break


# Diagnosis


def diagnose_collectives(dumps: Mapping[int, Dump]) -> Diagnosis | None:
    """Return what recorded collectives show of ranks that make no progress, None where all have completed."""
    mismatch = next(find_mismatches(dumps), None)
    if mismatch is not None:
        return _mismatch(mismatch)
    waits = sorted(find_waits(dumps), key=lambda wait: min(c.created_ns for c in wait.inside.values()))
    if not waits:
        return None
    return _cycle(waits) or _absent(waits) or _all_inside(waits[0])


def _mismatch(found: Mismatch) -> Diagnosis:
    def words(call: CollectiveRecord) -> str:
        return f"{call.operation}({call.tensors})"

    def part(call: CollectiveRecord) -> object:
        return {
            Disagreement.OPERATION: call.operation,
            Disagreement.SIZES: _compared_sizes(call),
            Disagreement.DTYPES: _compared_dtypes(call),
        }[found.kind]

    ((common, count),) = Counter(map(part, found.calls.values())).most_common(1)
    odd = [rank for rank, call in found.calls.items() if part(call) != common]
    first = next(iter(found.calls.values()))
    at = f"collective {first.number}{first.group_words}"
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
            next_check="make all ranks issue the collectives of these groups in the same order",
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
    found = [wait for wait in waits if wait.absent]
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
        f"{kind}: rank {_join(absent)} has not issued {wait.call.text}, in which "
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
