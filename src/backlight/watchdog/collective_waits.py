"""Collectives of several ranks that differ, and those that have not completed. No torch.

Collectives of one group are matched by their number.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backlight.watchdog.flight_recorder import CollectiveRecord, Dump

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
    is_queued: bool = False  # the absent ranks have issued it, and wait in an earlier call

    @property
    def missing(self) -> str:
        """What the absent ranks have not issued, in words."""
        if self.call.peer is None:
            return self.call.text
        return f"the {'receive' if self.call.operation == 'send' else 'send'} for {self.call.text}"


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
            (Disagreement.SIZES, compared_sizes),
            (Disagreement.DTYPES, compared_dtypes),
        ):
            if len({part(c) for c in column.values()}) > 1:
                return Mismatch(kind, column)
    return None


def _compares_inputs(operation: str) -> bool:
    return not operation.startswith(("all_to_all", "scatter", "broadcast"))  # only the root has some


def _compares_outputs(operation: str) -> bool:
    return not operation.startswith(("all_to_all", "gather"))


def compared_sizes(call: CollectiveRecord) -> object:
    """Return the sizes in which the ranks of a collective agree.

    One tensor for each rank may have a size of its own, and so has the other side of that rank.
    """
    takes, gives = _compares_inputs(call.operation), _compares_outputs(call.operation)
    gathers, scatters = len(call.inputs) == 1 < len(call.outputs), len(call.outputs) == 1 < len(call.inputs)
    return (
        call.inputs if takes and not (gives and gathers) else None,
        call.outputs if gives and not (takes and scatters) else None,
    )


def compared_dtypes(call: CollectiveRecord) -> object:
    """Return the types in which the ranks of a collective agree."""
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
                rank: calls[number][0]
                for rank, calls in calls_of.items()
                if number in calls and not all(c.completed for c in calls[number])
            }
            if not inside:
                continue
            absent = tuple(r for r in members if newest.get(r, 0) < number)
            last = {r: calls_of[r][newest[r]][0] if r in newest else None for r in absent}
            yield Wait(next(iter(inside.values())), inside, absent, last)
            break
