"""What several ranks held of the same parameters and transfers, from what each has stored. No torch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.correctness.model.facts import Fact, decode
from backlight.store.read.run import Run

ABSENT = -1.0
"""Norm of what a rank does not hold."""

MOMENTS = ("weights", "gradients")
"""In the order of a step."""

MAX_RANKS = 16
"""Ranks that are compared, at most: of a thousand, the first suffice."""


@dataclass(frozen=True)
class Promise:
    """What keeps the parameters in some rows equal on ``ranks``: bit by bit where it is ``exact``."""

    by: str
    ranks: tuple[int, ...]
    exact: bool
    rows: tuple[int, ...] = ()


class Followed(Fact, event="replicas"):
    """The parameters that a rank reads, and which of them are promised to be equal."""

    names: tuple[str, ...]
    promises: tuple[Promise, ...]


class Digests(Fact, event="digests"):
    """Digests and norms of these parameters at one of :data:`MOMENTS`, as bytes in hexadecimal digits.

    ``backwards`` are the backward passes that the rank had run; the last one reduced no gradients, on
    purpose, if it is ``unsynced``.
    """

    moment: str
    backwards: int
    unsynced: bool
    digests: str
    norms: str

    def arrays(self) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return the digests ``[P]`` and the norms ``[P]``."""
        digests, norms = bytes.fromhex(self.digests), bytes.fromhex(self.norms)
        return np.frombuffer(digests, np.uint32), np.frombuffer(norms, np.float32)


class Transferred(Fact, event="transfer"):
    """A digest and the norm of what a collective gave this rank, or of what it sent or received."""

    call: str
    end: str
    channel: str
    number: int
    form: tuple[str, ...]
    digest: str
    norm: float


def encoded(digests_P: NDArray[np.int64], norms_P: NDArray[np.float32]) -> tuple[str, str]:
    """Return the digests and the norms as :meth:`Digests.arrays` reads them."""
    folded = (digests_P ^ (digests_P >> 32)).astype(np.uint32)
    return folded.tobytes().hex(), norms_P.astype(np.float32).tobytes().hex()


def _of_last_attempt(run: Run) -> list[Fact]:
    """Return the facts of the first ranks of the last attempt, as they were stored; empty for one rank."""
    if not run.attempts or len(run.attempts[-1].ranks) < 2:
        return []
    events = [e for e in run.events() if e.attempt == run.attempts[-1].index and e.rank < MAX_RANKS]
    return [fact for event in events if (fact := decode(event)) is not None]


# Weights and gradients


@dataclass(frozen=True)
class Values:
    """What one rank held of a parameter at one moment."""

    digest: int
    norm: float
    promise: Promise


@dataclass
class Moment:
    """What the ranks held at one moment of a step: by parameter, then by rank."""

    step: int
    name: str
    parameters: dict[str, dict[int, Values]] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)
    unsynced: set[int] = field(default_factory=set)

    def add(self, followed: Followed, digests: Digests) -> None:
        """Add the values of a rank."""
        self.backwards[digests.rank] = digests.backwards
        if digests.unsynced:
            self.unsynced.add(digests.rank)
        promises = [Promise("", (), exact=False)] * len(followed.names)
        for promise in followed.promises:
            for row in promise.rows:
                promises[row] = promise
        for name, promise, digest, norm in zip(followed.names, promises, *digests.arrays(), strict=True):
            if norm != ABSENT:
                values = Values(int(digest), float(norm), promise)
                self.parameters.setdefault(name, {})[digests.rank] = values


def moments(run: Run) -> Iterator[Moment]:
    """Yield the observed moments of the last attempt at which all ranks were at the same place, in order."""
    followed: dict[int, Followed] = {}
    observed: dict[tuple[int, int], Moment] = {}
    for fact in _of_last_attempt(run):
        if isinstance(fact, Followed):
            followed[fact.rank] = fact
        elif isinstance(fact, Digests) and fact.rank in followed:
            key = fact.step, MOMENTS.index(fact.moment)
            observed.setdefault(key, Moment(fact.step, fact.moment)).add(followed[fact.rank], fact)
    for key in sorted(observed):
        if len(set(observed[key].backwards.values())) == 1:
            yield observed[key]


# Transfers


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
    transfers: dict[tuple[str, int], dict[int, Transferred]] = defaultdict(dict)
    digests_of: dict[tuple[str, int], set[str]] = defaultdict(set)
    for fact in _of_last_attempt(run):
        if isinstance(fact, Transferred):
            transfers[fact.channel, fact.number][fact.rank] = fact
            digests_of[fact.channel, fact.rank].add(fact.digest)
    out, compared = [], 0
    for (channel, _), by_rank in transfers.items():
        is_same_form = len({fact.form for fact in by_rank.values()}) == 1
        # Values that are not finite have several representations.
        if len(by_rank) < 2 or not is_same_form or not all(math.isfinite(t.norm) for t in by_rank.values()):
            continue
        compared += 1
        digests = {rank: fact.digest for rank, fact in by_rank.items()}
        if len(set(digests.values())) > 1 and not any(
            digest in digests_of[channel, other]
            for digest in digests.values()
            for other in digests
            if digests[other] != digest
        ):
            out.append(_described(by_rank, list(digests.values())))
    return sorted(out, key=lambda transfer: transfer.step), compared


def _described(by_rank: dict[int, Transferred], digests: Sequence[str]) -> Differing:
    ends = {fact.end: rank for rank, fact in by_rank.items()}
    if "recv" in ends:
        ranks: tuple[int, ...] = (ends["recv"],)
    else:  # where there is no majority, the first rank counts as right
        right = max(sorted(by_rank), key=lambda rank: digests.count(by_rank[rank].digest))
        ranks = tuple(sorted(r for r in by_rank if by_rank[r].digest != by_rank[right].digest))
    call = next(iter(by_rank.values())).call
    norms = {rank: fact.norm for rank, fact in sorted(by_rank.items())}
    step = min(fact.step for fact in by_rank.values())
    return Differing("recv" if call == "send" else call, "recv" in ends, step, ranks, norms)


# Steps


@dataclass(frozen=True)
class OutOfStep:
    """Ranks whose steps are not those of the others from ``step`` on.

    ``seen`` is how many backward passes each rank had seen by then; ``common`` is what most had.
    """

    step: int
    ranks: tuple[int, ...]
    seen: dict[int, int]
    common: int
    steps: int


def out_of_step(run: Run) -> OutOfStep | None:
    """Return from where on ranks that began together were at other places at the same count of steps.

    Ranks that differ from their first step on, such as those of some pipelines, say nothing by it.
    """
    places = run.spread("backwards_seen", attempt=run.attempts[-1].index) if run.attempts else None
    if places is None or len(places.ranks) < 2:
        return None
    whole = places.logged.all(axis=1)
    seen_SR, steps = places.values[whole], places.steps[whole]
    differ = (seen_SR != seen_SR[:, :1]).any(axis=1)
    if not len(steps) or differ[0] or not differ.any():
        return None
    row = int(np.flatnonzero(differ)[0])
    counts = seen_SR[row].astype(int).tolist()
    # Where there is no majority: who has seen more backward passes took fewer steps.
    common = max(Counter(counts).items(), key=lambda item: (item[1], -item[0]))[0]
    ranks = tuple(r for r, count in zip(places.ranks, counts, strict=True) if count != common)
    seen = dict(zip(places.ranks, counts, strict=True))
    return OutOfStep(int(steps[row]), ranks, seen, int(common), int(differ.sum()))
