"""Comparison of the ranks of one run: missing ranks, clocks, and which rank of each group is late."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import OPERATOR
from backlight.trace.collectives import collectives
from backlight.trace.events import Integers, TraceError
from backlight.trace.timeline import Timeline

CLOCK_TOLERANCE_NS = 1_000_000
"""Times of machines whose clocks differ by more are not compared."""

MIN_COMMON_OPERATORS = 0.4
"""Share of the operators of one rank that the other must have; stages of a pipeline share nearly all."""

Group = tuple[int, ...]


@dataclass(frozen=True)
class Lateness:
    """One step of one process group, in nanoseconds by rank; ``group`` are its given ranks.

    ``waited`` is the time in collectives beyond the shortest stay of any rank, which needs no common clock:
    the rank that comes ``last`` waits least, by ``delay`` less than the median of the others.
    """

    step: int
    group: Group
    duration: dict[int, int]
    waited: dict[int, int]
    last: int
    delay: int


@dataclass(frozen=True)
class Ranks:
    """Comparison of the common steps of several ranks.

    ``collectives`` counts those that all given ranks of their group have; ``offsets`` are nanoseconds of each
    clock ahead of the first rank's, from their ends, which leave together, for the ranks that collectives
    connect with it; ``clocks`` is ``"agree"``, ``"disagree"`` or ``"not measured"``; ``steps`` are by group;
    ``notes`` list what is not known.
    """

    given: tuple[int, ...]
    world_size: int | None
    missing: tuple[int, ...]
    collectives: int
    offsets: dict[int, int]
    clocks: str
    steps: tuple[Lateness, ...]
    notes: tuple[str, ...]


def check_ranks(timelines: list[Timeline]) -> dict[int, Timeline]:
    """Return the timelines by rank; raise a :class:`TraceError` where they are not those of one run."""
    by_rank: dict[int, Timeline] = {}
    sizes = {}
    for timeline in timelines:
        trace = timeline.trace
        if trace.rank is None:
            raise TraceError(
                f"{trace.path}: its rank is not known: neither distributedInfo in the file nor 'rank-N' in "
                "its name states it. Name the files trace_rank-0.json, trace_rank-1.json, or give one file"
            )
        if trace.rank in by_rank:
            raise TraceError(
                f"{trace.path}: is of rank {trace.rank}, as {by_rank[trace.rank].trace.path} is; "
                "expected one file per rank of one run"
            )
        by_rank[trace.rank] = timeline
        if trace.world_size is not None:
            sizes[trace.world_size] = trace.path
    if len(sizes) > 1:
        stated = ", ".join(f"{size} ranks in {path}" for size, path in sizes.items())
        raise TraceError(f"the files are of different runs: {stated}")
    _check_operators(timelines)
    return dict(sorted(by_rank.items()))


def _check_operators(timelines: list[Timeline]) -> None:
    """Raise where a file shares hardly any operator with the first: it is of an unrelated training run."""
    first, *others = timelines
    names = _operators(first)
    for other in others:
        theirs = _operators(other)
        smaller = min(len(names), len(theirs))
        common = len(names & theirs)
        if smaller and common < MIN_COMMON_OPERATORS * smaller:
            raise TraceError(
                f"{other.trace.path}: is of another training run than {first.trace.path}: they have {common} "
                f"operators in common, of {len(theirs)} and {len(names)}; expected one file per rank"
            )


def _operators(timeline: Timeline) -> set[int | str]:
    events = timeline.events
    words = events.words["name"]
    return {words[code] for code in np.unique(events["name"][events.among(OPERATOR)]) if code >= 0}


def ranks(by_rank: dict[int, Timeline]) -> Ranks:
    """Compare the ranks that :func:`check_ranks` returned."""
    order = tuple(by_rank)
    stated = [t.trace.world_size for t in by_rank.values() if t.trace.world_size is not None]
    size = stated[0] if stated else None
    missing = tuple(rank for rank in range(size or 0) if rank not in by_rank)
    notes = []
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        verb = "is" if len(missing) == 1 else "are"
        notes.append(
            f"{len(order)} of {size} ranks given; {shown} {verb} missing: "
            "lateness is evaluated among those given"
        )
    numbers = [{s.number for s in timeline.steps if s.number is not None} for timeline in by_rank.values()]
    common = sorted(set.intersection(*numbers))
    if not common:
        notes.append("the ranks have no step of the same number: they cannot be compared step by step")
    by_group, unknown = _by_group(by_rank, set(common))
    if unknown:
        notes.append(
            f"{unknown:,} collectives do not record their process group, and the run has several: they are "
            "not compared"
        )
    offsets, clocks = _clocks(order, {group: ends for group, (_, ends, _) in by_group.items()})
    if clocks == "disagree":
        worst = max(offsets, key=lambda rank: abs(offsets[rank]))
        notes.append(
            f"clocks disagree: that of rank {worst} is {offsets[worst] / 1e6:+.3f} ms off that of rank "
            f"{order[0]} by the ends of common collectives; ranks are compared by durations only"
        )
    elif clocks == "not measured":
        notes.append("no collective is common to the ranks: whether their clocks agree is not measured")
    elif len(offsets) < len(order):
        others = ", ".join(str(rank) for rank in order if rank not in offsets)
        notes.append(f"no collective connects rank {order[0]} with {others}: their clocks are not compared")
    steps = tuple(
        _lateness(number, group, by_rank, (ends - starts)[owner == number])
        for group, (starts, ends, owner) in by_group.items()
        for number in common
        if (owner == number).any()
    )
    count = sum(len(ends) for _, ends, _ in by_group.values())
    return Ranks(order, size, missing, count, offsets, clocks, steps, tuple(notes))


def _by_group(
    by_rank: dict[int, Timeline], common: set[int]
) -> tuple[dict[Group, tuple[Integers, Integers, Integers]], int]:
    """Return start and end of common collectives, int64 [C, ranks], and their step, int64 [C], by group.

    A group is that of the given ranks, two or more; the number is that of collectives of no known group.
    """
    members = tuple(by_rank)
    ends: dict[Group, dict[int, dict[tuple[int, str, int, int], tuple[int, int]]]] = defaultdict(dict)
    listed = {rank: collectives(timeline) for rank, timeline in by_rank.items()}
    several = any(len({call.group for call in mine if call.group}) > 1 for mine in listed.values())
    unknown = 0
    for rank, timeline in by_rank.items():
        base = timeline.trace.base
        mine: dict[Group, dict[tuple[int, str, int], tuple[int, int]]] = defaultdict(dict)
        counts: dict[tuple[Group, int, str], int] = defaultdict(int)
        for call in listed[rank]:
            if call.step not in common or call.step is None:
                continue
            if call.group is None and (several or _has_several(timeline)):
                unknown += 1
                continue
            group = members if call.group is None else tuple(r for r in sorted(call.group) if r in by_rank)
            if len(group) < 2:
                continue
            index = counts[group, call.step, call.name]
            mine[group][call.step, call.name, index] = (call.start + base, call.end + base)
            counts[group, call.step, call.name] += 1
        for group, rows in mine.items():
            # One more or less of a kind within a step shifts all that follow: that kind is not matched there.
            ends[group][rank] = {(*key, counts[group, key[0], key[1]]): times for key, times in rows.items()}
    result = {}
    for group, sides in sorted(ends.items(), key=lambda item: (-len(item[0]), item[0])):
        if set(sides) == set(group):
            keys = sorted(set.intersection(*(set(side) for side in sides.values())))
            times = np.array([[sides[r][key] for r in group] for key in keys], dtype=np.int64)
            times = times.reshape(len(keys), len(group), 2)
            if keys:
                owner = np.array([key[0] for key in keys], dtype=np.int64)
                result[group] = (times[:, :, 0], times[:, :, 1], owner)
    return result, unknown


def _has_several(timeline: Timeline) -> bool:
    about = timeline.trace.metadata.get("distributedInfo")
    listed = about.get("pg_config") if isinstance(about, dict) else None
    return isinstance(listed, list) and len(listed) > 1


def _clocks(members: Group, ends: dict[Group, Integers]) -> tuple[dict[int, int], str]:
    """Return the offsets of the clocks that collectives connect with the first rank's."""
    if not ends:
        return {}, "not measured"
    offsets = {members[0]: 0}
    is_off, grown = False, True
    while grown:
        grown = False
        for group, times in ends.items():
            connected = [rank for rank in group if rank in offsets]
            if not connected or len(connected) == len(group):
                continue
            reference = group.index(connected[0])
            differences = times - times[:, reference : reference + 1]
            middle = np.median(differences, axis=0)
            spread = np.median(np.abs(differences - middle), axis=0)
            is_off |= bool(((np.abs(middle) > CLOCK_TOLERANCE_NS) & (np.abs(middle) > 5 * spread)).any())
            for rank, value in zip(group, middle, strict=True):
                offsets.setdefault(rank, offsets[connected[0]] + int(value))
            grown = True
    if len(offsets) == 1 and len(members) > 1:
        return {}, "not measured"
    return {rank: offsets[rank] for rank in members if rank in offsets}, "disagree" if is_off else "agree"


def _lateness(number: int, group: Group, by_rank: dict[int, Timeline], stay: Integers) -> Lateness:
    duration = {}
    for rank in group:
        step = next(step for step in by_rank[rank].steps if step.number == number)
        duration[rank] = step.end - step.start
    beyond = (stay - stay.min(axis=1, keepdims=True)).sum(axis=0)
    waited = {rank: int(value) for rank, value in zip(group, beyond, strict=True)}
    last = min(waited, key=lambda rank: waited[rank])
    others = [value for rank, value in waited.items() if rank != last]
    delay = int(np.median(others)) - waited[last] if others else 0
    return Lateness(number, group, duration, waited, last, delay)


@dataclass(frozen=True)
class Straggler:
    """The rank of a group that most often comes last: in ``count`` of ``steps``, by ``delay`` of a step."""

    group: Group
    rank: int
    delay: float
    count: int
    steps: int


def stragglers(ranks: Ranks) -> list[Straggler]:
    """Return the rank of each group that most often comes last; ``delay`` is its median."""
    late = []
    for group in dict.fromkeys(step.group for step in ranks.steps):
        steps = [step for step in ranks.steps if step.group == group]
        last = [step.last for step in steps]
        rank = max(sorted(set(last)), key=last.count)
        lateness = [step.delay / max(step.duration[rank], 1) for step in steps if step.last == rank]
        late.append(Straggler(group, rank, float(np.median(lateness)), len(lateness), len(steps)))
    return late
