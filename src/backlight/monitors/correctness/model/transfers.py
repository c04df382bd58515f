"""Transfers whose data differs between ranks, from the digests that each has stored. No torch."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from backlight.monitors.correctness.model.digests import MAX_RANKS
from backlight.store.read.run import Event, Run

TRANSFER = "transfer"
"""Kind of the event with ``call``, ``end``, ``channel``, ``number``, ``form``, ``digest`` and ``norm``."""


@dataclass(frozen=True)
class Differing:
    """A transfer of which ``ranks`` hold other values than the others; ``norms`` are those of all.

    ``is_pair`` is whether it went from one rank to another, which then is the one of ``ranks``.
    """

    call: str
    is_pair: bool
    step: int
    ranks: tuple[int, ...]
    norms: dict[int, float]


def differing(run: Run) -> tuple[list[Differing], int]:
    """Return the transfers of the last attempt that differ, in order, and how many were compared.

    A value that another rank has of another transfer of the same channel is no evidence: the ranks may have
    been counted from different transfers on.
    """
    if not run.attempts or len(run.attempts[-1].ranks) < 2:
        return [], 0
    last = run.attempts[-1].index
    found: dict[tuple[str, int], dict[int, Event]] = defaultdict(dict)
    held: dict[tuple[str, int], set[str]] = defaultdict(set)
    for event in run.events(TRANSFER):
        if event.attempt == last and event.rank < MAX_RANKS:
            channel = str(event.payload["channel"])
            found[channel, int(event.payload["number"])][event.rank] = event
            held[channel, event.rank].add(str(event.payload["digest"]))
    out, compared = [], 0
    for (channel, _), events in found.items():
        forms = {str(event.payload["form"]) for event in events.values()}
        norms = {rank: float(event.payload["norm"]) for rank, event in sorted(events.items())}
        # Values that are not finite have several representations.
        if len(events) < 2 or len(forms) > 1 or not all(map(math.isfinite, norms.values())):
            continue
        compared += 1
        digests = {rank: str(event.payload["digest"]) for rank, event in events.items()}
        if len(set(digests.values())) > 1 and not any(
            own in held[channel, other]
            for rank, own in digests.items()
            for other in digests
            if digests[other] != own
        ):
            out.append(_described(events, digests, norms))
    return sorted(out, key=lambda one: one.step), compared


def _described(events: dict[int, Event], digests: dict[int, str], norms: dict[int, float]) -> Differing:
    ends = {str(event.payload["end"]): rank for rank, event in events.items()}
    counts = list(digests.values())
    if "recv" in ends:
        ranks: tuple[int, ...] = (ends["recv"],)
    else:  # where there is no majority, the first rank counts as right
        right = max(sorted(digests), key=lambda rank: counts.count(digests[rank]))
        ranks = tuple(sorted(rank for rank in digests if digests[rank] != digests[right]))
    first = next(iter(events.values()))
    step = min(event.step or 0 for event in events.values())
    call = "recv" if first.payload["call"] == "send" else str(first.payload["call"])
    return Differing(call, "recv" in ends, step, ranks, norms)
