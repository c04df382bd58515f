"""Sends and receives of several ranks in pairs: which differ, and which have not completed. No torch.

The receives of a rank from another one take its sends in their order. The calls of a batch run together on
the stream of the group, a single one on a stream of its two ranks; on a stream one waits for the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from backlight.watchdog.collective_waits import Disagreement, Mismatch, Wait
from backlight.watchdog.flight_recorder import CollectiveRecord, Dump

Route = tuple[str, int, int]
"""Group, rank that sends, and rank that receives."""


class _Calls:
    """What one rank sends and receives: by route, and ``heads``, the open calls that no stream holds back."""

    def __init__(self, dump: Dump) -> None:
        self.is_whole = dump.is_whole
        self.by_route: dict[Route, list[CollectiveRecord]] = {}
        self.heads: list[tuple[Route, CollectiveRecord]] = []
        first: dict[tuple[str, int | None], int] = {}  # open batch or call of each stream
        for number, record in enumerate(dump.records):
            if record.peer is None:
                continue
            ends = (dump.rank, record.peer) if record.operation == "send" else (record.peer, dump.rank)
            route = record.group, *ends
            self.by_route.setdefault(route, []).append(record)
            stream = record.group, record.peer if record.batch is None else None
            place = number if record.batch is None else record.batch
            if not record.completed and first.setdefault(stream, place) == place:
                self.heads.append((route, record))

    def position(self, route: Route, record: CollectiveRecord, *, is_whole: bool) -> int:
        """Return the place of a call on its route: of all, or of the open ones where some may be lost."""
        return next(n for n, one in enumerate(self.on(route, is_whole=is_whole)) if one is record)

    def on(self, route: Route, *, is_whole: bool) -> list[CollectiveRecord]:
        """Return the calls of a route, or the open ones."""
        return [one for one in self.by_route.get(route, ()) if is_whole or not one.completed]

    def holds_back(self, record: CollectiveRecord) -> bool:
        """Return whether an open call waits for another one of its stream."""
        return not record.completed and all(one is not record for _, one in self.heads)


def find_unlike_pairs(dumps: Mapping[int, Dump]) -> Iterator[Mismatch]:
    """Yield the first send of each route whose receive takes another number of elements, or another dtype."""
    calls_of = {rank: _Calls(dump) for rank, dump in dumps.items() if dump.is_whole}
    for source, calls in calls_of.items():
        for route, sends in calls.by_route.items():
            if route[1] != source or route[2] not in calls_of:
                continue
            for sent, received in zip(sends, calls_of[route[2]].by_route.get(route, ()), strict=False):
                kind = _differ(sent, received)
                if kind is not None:
                    yield Mismatch(kind, {source: sent, route[2]: received})
                    break


def _differ(sent: CollectiveRecord, received: CollectiveRecord) -> Disagreement | None:
    if [math.prod(size) for size in sent.inputs] != [math.prod(size) for size in received.outputs]:
        return Disagreement.SIZES
    return Disagreement.DTYPES if sent.dtypes[0] != received.dtypes[1] else None


def find_open_pairs(dumps: Mapping[int, Dump]) -> Iterator[Wait]:
    """Yield the sends and receives that have not completed, as far as no earlier one holds them back."""
    calls_of = {rank: _Calls(dump) for rank, dump in dumps.items()}
    seen = set()
    for rank, calls in calls_of.items():
        for route, record in calls.heads:
            peer = record.peer
            assert peer is not None
            if peer not in calls_of:
                yield Wait(record, {rank: record}, ())
                continue
            other = calls_of[peer]
            is_whole = calls.is_whole and other.is_whole
            at = calls.position(route, record, is_whole=is_whole)
            if (route, at) in seen:
                continue
            seen.add((route, at))
            there = other.on(route, is_whole=is_whole)
            if at >= len(there):
                yield Wait(record, {rank: record}, (peer,), {peer: there[-1] if there else None})
            elif other.holds_back(there[at]):
                yield Wait(record, {rank: record}, (peer,), is_queued=True)
            else:
                inside = {rank: record, **({} if there[at].completed else {peer: there[at]})}
                yield Wait(record, inside, ())
