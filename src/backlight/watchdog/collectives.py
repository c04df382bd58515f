"""Collectives of several ranks, matched: which differ, and which have not completed. No torch.

One record for what the flight recorder holds and for the calls that the shared state holds. Collectives of
one group are matched by their number. The receives of a rank from another one take its sends in their order:
the calls of a batch run together on the stream of the group, a single one on a stream of its two ranks, and
on a stream one waits for the one before.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backlight.records import Phase

MAX_SIZES = 8
"""Tensors of a collective whose sizes a text holds."""

Sizes = tuple[tuple[int, ...], ...]

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name.removeprefix("torch."))


@dataclass(frozen=True)
class Carried:
    """Parameters whose gradients or shards a collective carries, by their names; ``bucket`` counts from 1."""

    first: str
    last: str
    count: int
    bucket: int = 0  # of DDP; 0 for shards of FSDP2
    num_buckets: int = 0


class Awaited:
    """What a rank waits in that waits for others: :class:`Reduction` or :class:`CollectiveRecord`."""


@dataclass(frozen=True)
class Reduction(Awaited):
    """A reduction of DDP inside backward, which no call shows; ``carries`` where its bucket is determined."""

    carries: Carried | None = None
    num_started: int = 0  # buckets that have all their gradients, where it may be any of them


@dataclass(frozen=True)
class CollectiveRecord(Awaited):
    """One collective that a rank has issued, as its flight recorder or its shared state holds it."""

    group: str  # name of the process group
    ranks: tuple[int, ...]  # of the group; empty where they are not known
    number: int  # counts the collectives of the group
    operation: str  # such as `all_reduce`
    inputs: Sizes = ()
    outputs: Sizes = ()
    dtypes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # of inputs and outputs
    started: bool = False  # on the device; gloo does not report it
    completed: bool = False
    created_ns: int = 0  # since the epoch
    backend: str = ""
    line: str = ""  # the user's line that issued it, where the stack is known
    label: str | None = ""  # description of the group
    phase: Phase | None = None  # in which it was issued, where the stack shows one
    carries: Carried | None = None
    is_point_to_point: bool = False  # a send, a receive or a batch of them, which have numbers of their own
    peer: int | None = None  # rank to which it sends, or from which it receives
    batch: int | None = None  # position of the entry that ends the batch in which it was issued
    call: str = ""  # the call without its number, where the source holds it as text
    arguments: int = 0  # checksum of arguments that all ranks share, where the source holds one

    @property
    def text(self) -> str:
        """The call: ``all_reduce(4x4 float32) #12 of group tp [0, 1]``."""
        return f"{self.call_text} #{self.number}{self.group_text}"

    @property
    def call_text(self) -> str:
        """The call without its number: ``send(8 float32) to rank 1``."""
        to = "" if self.peer is None else f" {'to' if self.operation == 'send' else 'from'} rank {self.peer}"
        return self.call or f"{self.operation}({self._tensors}){to}"

    @property
    def _tensors(self) -> str:
        """Sizes and types of the inputs, or of the outputs where there are none."""
        sizes, dtypes = (self.inputs, self.dtypes[0]) if any(self.inputs) else (self.outputs, self.dtypes[1])
        names = itertools.chain(dtypes, itertools.repeat(dtypes[-1] if dtypes else ""))
        named = zip(sizes, names, strict=False)
        parts = [f"{'x'.join(map(str, size)) or 'scalar'} {_dtype(dtype)}".strip() for size, dtype in named]
        return ", ".join(parts[:MAX_SIZES]) + (", ..." if len(parts) > MAX_SIZES else "")

    @property
    def group_text(self) -> str:
        """The group, where it is not that of all ranks."""
        if self.label == "default_pg":
            return ""
        name = "" if self.label is None else f" {self.label if self.label not in _NO_LABEL else self.group}"
        return f" of group{name}{f' {list(self.ranks[:8])}' if self.ranks else ''}"


_NO_LABEL = {"", "undefined"}


@dataclass(frozen=True)
class Dump:
    """The recorded collectives of one rank, oldest first; ``is_whole``: none has been overwritten."""

    rank: int
    records: tuple[CollectiveRecord, ...]
    is_whole: bool = True


Dumps = Mapping[int, Dump]
"""What each rank has recorded."""


# What a match shows


class Part(enum.Enum):
    """Part in which collectives of one number differ."""

    OPERATION = enum.auto()
    ARGUMENTS = enum.auto()
    SIZES = enum.auto()
    DTYPES = enum.auto()


class Match:
    """What the collectives of ranks show, compared: a record of a subclass."""


@dataclass(frozen=True)
class Mismatch(Match):
    """A collective in which ranks differ; ``rank`` is the one that differs from a majority, if any."""

    part: Part
    group: str
    number: int
    rank: int | None
    calls: Mapping[int, CollectiveRecord] = field(compare=False)


@dataclass(frozen=True)
class Wait:
    """A collective that has not completed: ranks that have issued it, and those that have not."""

    call: CollectiveRecord  # of the first rank in it
    inside: Mapping[int, CollectiveRecord]
    absent: tuple[int, ...]
    last: Mapping[int, CollectiveRecord | None] = field(default_factory=dict)  # of each absent rank, in it
    is_queued: bool = False  # the absent ranks have issued it, and wait in an earlier call


@dataclass(frozen=True)
class Cycle(Match):
    """Ranks that wait for each other: each call with the ranks that wait in it first."""

    waits: tuple[tuple[CollectiveRecord, tuple[int, ...]], ...]
    cause: int | None


Elsewhere = Mapping[int, Awaited]
"""In what each rank waits."""


@dataclass(frozen=True)
class Absence(Match):
    """Ranks that have not issued a collective in which others wait, and in what they wait instead."""

    wait: Wait
    absent: tuple[int, ...]
    cause: int | None
    last: CollectiveRecord | None = None  # of the cause, in this group
    elsewhere: Elsewhere = field(default_factory=dict)


@dataclass(frozen=True)
class Unfinished(Match):
    """A collective that every rank has issued; ``late``: the device of these ranks has not started it."""

    wait: Wait
    late: tuple[int, ...]


def match_records(dumps: Dumps) -> Match | None:
    """Return what the collectives of ranks that make no progress show, None where all have completed."""
    mismatch = find_mismatch(dumps)
    if mismatch is not None:
        return mismatch
    waits = sorted(
        itertools.chain(find_waits(dumps), find_open_pairs(dumps)),
        key=lambda wait: min(call.created_ns for call in wait.inside.values()),
    )
    if not waits:
        return None
    return _cycle(waits) or _absence(waits) or _unfinished(next(w for w in waits if not w.absent))


def find_mismatch(dumps: Dumps) -> Mismatch | None:
    """Return the first collective in which ranks differ."""
    return next(itertools.chain(find_mismatches(dumps), find_unlike_pairs(dumps)), None)


def match_calls(calls: Dumps, elsewhere: Elsewhere) -> Cycle | Absence | None:
    """Match blocking calls, of which a rank is in one at most, and may wait in what no call shows."""
    waits = list(find_waits(calls, pick=max))
    return _cycle(waits) or _absence(waits, elsewhere)


def _cycle(waits: Sequence[Wait]) -> Cycle | None:
    """Find ranks that wait for each other, in different groups or under different numbers of a group.

    The chain is followed from each wait, to a rank that waits in none or around a cycle.
    """
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
        return Cycle(tuple((wait.inside[ranks[0]], tuple(ranks)) for wait, ranks in waiting), cause)
    return None


def _next_wait(wait: Wait, first: Mapping[int, Wait]) -> Wait | None:
    """Return the other collective in which a rank waits that ``wait`` lacks."""
    return next((first[r] for r in wait.absent if r in first and first[r] is not wait), None)


def _absence(waits: Sequence[Wait], elsewhere: Elsewhere | None = None) -> Absence | None:
    """Find the ranks that have not issued a collective in which others wait, and wait in none themselves.

    Where they wait in what is not matched, ``elsewhere``, only a majority shows which side is at fault.
    """
    inside = {rank for wait in waits for rank in wait.inside}
    lacking = [wait for wait in waits if wait.absent and not wait.is_queued]
    if not lacking:
        return None
    wait = next((w for w in lacking if not inside.issuperset(w.absent)), lacking[0])
    absent = tuple(r for r in wait.absent if r not in inside) or wait.absent
    if elsewhere is not None:
        fewer, more = sorted((tuple(wait.inside), absent), key=len)
        cause = fewer[0] if len(fewer) == 1 < len(more) else None
        return Absence(wait, absent, cause, None, {r: elsewhere[r] for r in absent if r in elsewhere})
    cause = absent[0] if len(absent) == 1 else None
    if cause is None:
        return Absence(wait, absent, None)
    call = next((w.inside[cause] for w in waits if cause in w.inside), None)
    return Absence(wait, absent, cause, wait.last.get(cause), {} if call is None else {cause: call})


def _unfinished(wait: Wait) -> Unfinished:
    late = tuple(sorted(r for r, call in wait.inside.items() if not call.started))
    return Unfinished(wait, late if len(late) < len(wait.inside) else ())


# Collectives of a group

Calls = dict[int, tuple[CollectiveRecord, ...]]
"""The collectives of one rank in one group by number; coalesced ones share a number."""


def _by_group(dumps: Dumps) -> dict[tuple[str, tuple[int, ...]], dict[int, Calls]]:
    calls_of: dict[tuple[str, tuple[int, ...]], dict[int, Calls]] = {}
    for rank, dump in dumps.items():
        for record in dump.records:
            if record.is_point_to_point:
                continue
            calls = calls_of.setdefault((record.group, record.ranks), {}).setdefault(rank, {})
            if calls and record.number < max(calls):
                calls.clear()  # the group was destroyed and made again
            calls[record.number] = (*calls.get(record.number, ()), record)
    return calls_of


def _members(key: tuple[str, tuple[int, ...]], calls_of: Mapping[int, Calls], dumps: Dumps) -> list[int]:
    """Return the observed ranks of a group, without those whose buffer may have lost its calls there."""
    ranks = key[1] or tuple(calls_of)
    return [r for r in ranks if r in dumps and (r in calls_of or dumps[r].is_whole)]


def find_mismatches(dumps: Dumps) -> Iterator[Mismatch]:
    """Yield the first collective of each group in which ranks differ."""
    for calls_of in _by_group(dumps).values():
        common = set.intersection(*(set(calls) for calls in calls_of.values()))
        for number in sorted(common) if len(calls_of) > 1 else ():
            # The oldest number of a buffer may have lost the first of the calls that share it.
            if any(
                number == min(calls) and not dumps[rank].is_whole and not calls[number][0].arguments
                for rank, calls in calls_of.items()
            ):
                continue
            mismatch = _compare({rank: calls[number] for rank, calls in calls_of.items()})
            if mismatch is not None:
                yield mismatch
                break


def _compare(calls: Mapping[int, Sequence[CollectiveRecord]]) -> Mismatch | None:
    """Compare what ranks have issued under one number."""
    if len({len(issued) for issued in calls.values()}) > 1:
        return _mismatch(Part.OPERATION, {rank: issued[-1] for rank, issued in calls.items()})
    for at in range(len(next(iter(calls.values())))):
        column = {rank: issued[at] for rank, issued in calls.items()}
        for part, value in _COMPARED.items():
            if len(set(map(value, column.values()))) > 1:
                return _mismatch(part, column)
    return None


def _mismatch(part: Part, calls: Mapping[int, CollectiveRecord]) -> Mismatch:
    value, first = _COMPARED[part], next(iter(calls.values()))
    ((common, count),) = Counter(map(value, calls.values())).most_common(1)
    others = [rank for rank, call in calls.items() if value(call) != common]
    return Mismatch(part, first.group, first.number, others[0] if len(others) == 1 < count else None, calls)


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


_COMPARED: dict[Part, Callable[[CollectiveRecord], object]] = {
    Part.OPERATION: lambda call: call.operation,
    Part.ARGUMENTS: lambda call: call.arguments,
    Part.SIZES: compared_sizes,
    Part.DTYPES: compared_dtypes,
}


def find_waits(dumps: Dumps, pick: Callable[[Iterable[int]], int] = min) -> Iterator[Wait]:
    """Yield, for each group, the ``pick`` of its collectives that have not completed where issued."""
    for key, calls_of in _by_group(dumps).items():
        members = _members(key, calls_of, dumps)
        newest = {rank: max(calls) for rank, calls in calls_of.items()}
        open_calls = {
            (number, rank): calls[number][0]
            for rank, calls in calls_of.items()
            for number in calls
            if not all(call.completed for call in calls[number])
        }
        if not open_calls:
            continue
        number = pick(number for number, _ in open_calls)
        inside = {rank: call for (n, rank), call in open_calls.items() if n == number}
        absent = tuple(r for r in members if newest.get(r, 0) < number)
        last = {r: calls_of[r][newest[r]][0] if r in newest else None for r in absent}
        yield Wait(next(iter(inside.values())), inside, absent, last)


# Sends and receives

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
        return next(n for n, call in enumerate(self.on(route, is_whole=is_whole)) if call is record)

    def on(self, route: Route, *, is_whole: bool) -> list[CollectiveRecord]:
        """Return the calls of a route, or the open ones."""
        return [call for call in self.by_route.get(route, ()) if is_whole or not call.completed]

    def holds_back(self, record: CollectiveRecord) -> bool:
        """Return whether an open call waits for another one of its stream."""
        return not record.completed and all(call is not record for _, call in self.heads)


def find_unlike_pairs(dumps: Dumps) -> Iterator[Mismatch]:
    """Yield the first send of each route whose receive takes another number of elements, or another dtype."""
    calls_of = {rank: _Calls(dump) for rank, dump in dumps.items() if dump.is_whole}
    for source, calls in calls_of.items():
        for route, sends in calls.by_route.items():
            if route[1] != source or route[2] not in calls_of:
                continue
            for sent, received in zip(sends, calls_of[route[2]].by_route.get(route, ()), strict=False):
                part = _compare_pair(sent, received)
                if part is not None:
                    yield Mismatch(part, sent.group, sent.number, None, {source: sent, route[2]: received})
                    break


def _compare_pair(sent: CollectiveRecord, received: CollectiveRecord) -> Part | None:
    if [math.prod(size) for size in sent.inputs] != [math.prod(size) for size in received.outputs]:
        return Part.SIZES
    return Part.DTYPES if sent.dtypes[0] != received.dtypes[1] else None


def find_open_pairs(dumps: Dumps) -> Iterator[Wait]:
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
