"""Comparison of the ranks of one run: missing ranks, clocks, and which rank is late."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import Kind
from backlight.trace.events import Integers, TraceError
from backlight.trace.timeline import Timeline

CLOCK_TOLERANCE_NS = 1_000_000
"""Times of machines whose clocks differ by more are not compared."""


@dataclass(frozen=True)
class Lateness:
    """One step over the ranks, in nanoseconds by rank.

    ``waited`` is the time in collectives beyond the shortest stay of any rank, which needs no common clock:
    the rank that comes ``last`` waits least, by ``delay`` less than the median of the others.
    """

    step: int
    duration: dict[int, int]
    waited: dict[int, int]
    last: int
    delay: int


@dataclass(frozen=True)
class Ranks:
    """Comparison of the common steps of several ranks.

    ``collectives`` counts those that all given ranks have; ``offsets`` are nanoseconds of each clock ahead of
    the first rank's, from their ends, which leave together; ``clocks`` is ``"agree"``, ``"disagree"`` or
    ``"not measured"``; ``notes`` list what is not known.
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
    return dict(sorted(by_rank.items()))


def ranks(by_rank: dict[int, Timeline]) -> Ranks:
    """Compare the ranks that :func:`check_ranks` returned."""
    given = tuple(by_rank)
    stated = [t.trace.world_size for t in by_rank.values() if t.trace.world_size is not None]
    size = stated[0] if stated else None
    missing = tuple(rank for rank in range(size or 0) if rank not in by_rank)
    notes = []
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        verb = "is" if len(missing) == 1 else "are"
        notes.append(
            f"{len(given)} of {size} ranks given; {shown} {verb} missing: "
            "lateness is evaluated among those given"
        )
    numbers = [{s.number for s in timeline.steps if s.number is not None} for timeline in by_rank.values()]
    common = sorted(set.intersection(*numbers))
    if not common:
        notes.append("the ranks have no step of the same number: they cannot be compared step by step")
    starts, ends, owner = _collectives(by_rank, common)
    offsets, clocks = _clocks(given, ends)
    if clocks == "disagree":
        worst = max(offsets, key=lambda rank: abs(offsets[rank]))
        notes.append(
            f"clocks disagree: that of rank {worst} is {offsets[worst] / 1e6:+.3f} ms off that of rank "
            f"{given[0]} by the ends of common collectives; ranks are compared by durations only"
        )
    elif clocks == "not measured":
        notes.append("no collective is common to the ranks: whether their clocks agree is not measured")
    steps = tuple(_lateness(number, given, by_rank, (ends - starts)[owner == number]) for number in common)
    return Ranks(given, size, missing, len(ends), offsets, clocks, steps if len(ends) else (), tuple(notes))


def _collectives(by_rank: dict[int, Timeline], common: list[int]) -> tuple[Integers, Integers, Integers]:
    """Return start and end of common collectives, int64 [C, ranks], and their step, int64 [C]."""
    found: list[dict[tuple[int, str, int, int], tuple[int, int]]] = []
    for timeline in by_rank.values():
        device, base = timeline.device, timeline.trace.base
        counts: dict[tuple[int, str], int] = defaultdict(int)
        mine = {}
        chosen = np.flatnonzero(device.of_kind(Kind.COMMUNICATION))
        steps = timeline.step_of(device.start[chosen])
        for event, index in zip(chosen.tolist(), steps.tolist(), strict=True):
            number = timeline.steps[index].number if index >= 0 else None
            if number is None or number not in common:
                continue
            name = timeline.name(int(device.rows[event]))
            mine[number, name, counts[number, name]] = (
                int(device.start[event]) + base,
                int(device.end[event]) + base,
            )
            counts[number, name] += 1
        # One more or less of a kind within a step shifts all that follow: that kind is not matched there.
        found.append({(*key, counts[key[:2]]): times for key, times in mine.items()})
    keys = sorted(set.intersection(*(set(one) for one in found)))
    times = np.array([[one[key] for one in found] for key in keys], dtype=np.int64)
    times = times.reshape(len(keys), len(found), 2)
    return times[:, :, 0], times[:, :, 1], np.array([key[0] for key in keys], dtype=np.int64)


def _clocks(given: tuple[int, ...], ends: Integers) -> tuple[dict[int, int], str]:
    if len(ends) == 0:
        return {}, "not measured"
    differences = ends - ends[:, :1]
    middle = np.median(differences, axis=0)
    spread = np.median(np.abs(differences - middle), axis=0)
    offsets = {rank: int(value) for rank, value in zip(given, middle, strict=True)}
    off = (np.abs(middle) > CLOCK_TOLERANCE_NS) & (np.abs(middle) > 5 * spread)
    return offsets, "disagree" if off.any() else "agree"


def _lateness(number: int, given: tuple[int, ...], by_rank: dict[int, Timeline], stay: Integers) -> Lateness:
    duration = {}
    for rank, timeline in by_rank.items():
        step = next(step for step in timeline.steps if step.number == number)
        duration[rank] = step.end - step.start
    beyond = (
        (stay - stay.min(axis=1, keepdims=True)).sum(axis=0) if len(stay) else np.zeros(len(given), np.int64)
    )
    waited = {rank: int(value) for rank, value in zip(given, beyond, strict=True)}
    last = min(waited, key=lambda rank: waited[rank])
    others = [value for rank, value in waited.items() if rank != last]
    delay = int(np.median(others)) - waited[last] if others else 0
    return Lateness(number, duration, waited, last, delay)


def straggler(ranks: Ranks) -> tuple[int, float, int] | None:
    """Return the rank that most often comes last, its median delay in steps, and in how many steps it did."""
    if not ranks.steps:
        return None
    last = [step.last for step in ranks.steps]
    rank = max(sorted(set(last)), key=last.count)
    own = [step.delay / max(step.duration[rank], 1) for step in ranks.steps if step.last == rank]
    return rank, float(np.median(own)), len(own)
