"""Which reduction of DistributedDataParallel a rank waits for, as far as its gradients tell. No torch.

The reducer works in native code and waits for all buckets at the end of backward. The reduction of a bucket
starts on a rank once all its gradients are there, so a bucket that is complete on one rank and not on another
is what the first one waits for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from backlight.monitors.stalls.model.observation import Observation
from backlight.records import Phase

Buckets = tuple[tuple[int, ...], ...]
"""Rows of the parameters in each bucket, in the order of reduction."""


def read(data: Any) -> Buckets:
    """Read the buckets that a rank wrote; empty for nothing, or for what is not understood."""
    try:
        return tuple(tuple(int(row) for row in bucket) for bucket in data or ())
    except (TypeError, ValueError):
        return ()


def name_reductions(observations: Sequence[Observation]) -> list[Observation]:
    """Return the views with the reduction that each may wait for in words."""
    return [
        dataclasses.replace(observation, reducing=said)
        if (said := _said(observation, observations))
        else observation
        for observation in observations
    ]


def _said(observation: Observation, observations: Sequence[Observation]) -> str:
    buckets, board = observation.buckets, observation.board
    if board is None or board.phase is not Phase.BACKWARD or not buckets:
        return ""
    started = [place for place, bucket in enumerate(buckets) if _complete(bucket, board.arrived)]
    if not started:
        return ""
    lacking = [
        place
        for place in started
        if any(_lacks(other, observation, buckets[place]) for other in observations)
    ]
    if lacking or len(started) == 1:
        place = (lacking or started)[0]
        return (
            f"the reduction of bucket {place + 1} of {len(buckets)} ({_names(observation, buckets[place])})"
        )
    return f"a reduction inside backward (of {len(started)} buckets of DDP that have all their gradients)"


def _complete(bucket: Sequence[int], arrived: bytes) -> bool:
    return bool(bucket) and all(row < len(arrived) and arrived[row] for row in bucket)


def _lacks(other: Observation, observation: Observation, bucket: Sequence[int]) -> bool:
    """Tell whether ``other`` has not come to the reduction that ``view`` is in."""
    theirs, mine = other.board, observation.board
    if other.rank == observation.rank or theirs is None or mine is None or not theirs.arrived:
        return False
    done = theirs.backwards + (theirs.phase is Phase.BACKWARD)
    if done != mine.backwards + 1:
        return done < mine.backwards + 1
    return not _complete(bucket, theirs.arrived)


def _names(observation: Observation, bucket: Sequence[int]) -> str:
    names = [observation.names[row] if row < len(observation.names) else f"parameter {row}" for row in bucket]
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}, {len(names)} parameters"
