"""Digests of what several ranks hold, as stored events, and where they part. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backlight.store.read.run import Event, Run

FOLLOWED = "replicas"
"""Kind of the event with ``names`` of parameters and ``promises``: ``by``, ``ranks``, ``exact``, ``rows``."""

DIGESTS = "digests"
"""Kind of the event with the digests of one moment of a step: ``moment`` is weights or gradients."""

ABSENT = -1.0
"""Norm of what a rank does not hold."""

MOMENTS = ("weights", "gradients")
"""In the order of a step."""

MAX_RANKS = 16
"""Ranks that are compared, at most: of a thousand, the first suffice."""


def encoded(digests_P: NDArray[np.int64], norms_P: NDArray[np.float32]) -> dict[str, str]:
    """Return the payload that :func:`decoded` reads."""
    folded = (digests_P ^ (digests_P >> 32)).astype(np.uint32)
    return {"digests": folded.tobytes().hex(), "norms": norms_P.astype(np.float32).tobytes().hex()}


def norms_of(bits_P: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return the norms ``[P]`` whose bits were copied as integers."""
    return bits_P.astype(np.int64).astype(np.int32).view(np.float32)


def decoded(event: Event) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Return the digests ``[P]`` and the norms ``[P]`` of an event."""
    digests, norms = (bytes.fromhex(event.payload[key]) for key in ("digests", "norms"))
    return np.frombuffer(digests, np.uint32), np.frombuffer(norms, np.float32)


@dataclass(frozen=True)
class Values:
    """What one rank held of a parameter at one moment."""

    digest: int
    norm: float
    by: str
    ranks: tuple[int, ...]
    is_exact: bool


@dataclass
class Moment:
    """What the ranks held at one moment of a step: by parameter, then by rank.

    ``backwards`` are the backward passes that each rank had run; ``unsynced`` the ranks whose last one did
    not reduce gradients, on purpose.
    """

    step: int
    name: str
    parameters: dict[str, dict[int, Values]] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)
    unsynced: set[int] = field(default_factory=set)


def moments(run: Run) -> Iterator[Moment]:
    """Yield the observed moments of the last attempt at which all ranks were at the same place, in order."""
    if not run.attempts or len(run.attempts[-1].ranks) < 2:
        return
    last = run.attempts[-1].index
    events = [e for e in run.events() if e.kind in {FOLLOWED, DIGESTS} and e.attempt == last]
    followed: dict[int, tuple[list[str], list[tuple[str, tuple[int, ...], bool]]]] = {}
    found: dict[tuple[int, int], Moment] = {}
    for event in events:
        if event.rank >= MAX_RANKS:
            continue
        if event.kind == FOLLOWED:
            followed[event.rank] = _promises(event)
        elif event.rank in followed and event.step is not None:
            key = (event.step, MOMENTS.index(event.payload["moment"]))
            moment = found.setdefault(key, Moment(event.step, event.payload["moment"]))
            _add(moment, event, *followed[event.rank])
    for key in sorted(found):
        if len(set(found[key].backwards.values())) == 1:
            yield found[key]


def _promises(event: Event) -> tuple[list[str], list[tuple[str, tuple[int, ...], bool]]]:
    names = [str(name) for name in event.payload["names"]]
    promises: list[tuple[str, tuple[int, ...], bool]] = [("", (), False)] * len(names)
    for one in event.payload["promises"]:
        for row in one["rows"]:
            promises[row] = (one["by"], tuple(one["ranks"]), one["exact"])
    return names, promises


def _add(
    moment: Moment, event: Event, names: Sequence[str], promises: Sequence[tuple[str, tuple[int, ...], bool]]
) -> None:
    moment.backwards[event.rank] = int(event.payload["backwards"])
    if event.payload["unsynced"]:
        moment.unsynced.add(event.rank)
    for name, promise, digest, norm in zip(names, promises, *decoded(event), strict=True):
        if norm != ABSENT:
            values = Values(int(digest), float(norm), *promise)
            moment.parameters.setdefault(name, {})[event.rank] = values
