"""Rates reached: operations and bytes by operator and shape, bandwidths of copies and collectives."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backlight.trace.classification import MEMCPY, MEMSET, Kind, kind_of
from backlight.trace.collectives import collectives
from backlight.trace.events import ITEM_BYTES, MISSING
from backlight.trace.operator_work import HAVE_WORK, is_shape, matrices, work
from backlight.trace.operators import Costs

_FACTORS = (
    ("allreduce", "2n"), ("all_reduce", "2n"), ("gather", "n"), ("scatter", "n"),
    ("alltoall", "n"), ("all_to_all", "n"),
)  # fmt: skip
"""How often each byte crosses a link: 2 (n - 1) / n or (n - 1) / n, for other collectives once."""


@dataclass(frozen=True)
class OperatorRate:
    """One operator with one set of shapes: its device time in ns, and TFLOP/s and TB/s.

    Operations are those of matrix products, convolutions and fused attention; what these call is their time.
    Bytes are those of the inputs and one output, of matrix products, elementwise operators and copies of
    torch: what must be moved at least. None where they are not known.
    """

    name: str
    shapes: str
    types: str
    calls: int
    device: int
    tflops: float | None
    tbytes: float | None


@dataclass(frozen=True)
class CopyRate:
    """Transfers of one name in GB/s: of the slowest, of all bytes in all their time, of the fastest."""

    name: str
    calls: int
    bytes: int
    min: float
    mean: float
    max: float


@dataclass(frozen=True)
class CollectiveRate:
    """Collectives of one kind, size and number of ranks.

    ``bus`` is the bandwidth of a link in GB/s that the median duration stands for, as nccl-tests defines it:
    it includes waiting for late ranks.
    """

    name: str
    ranks: int
    bytes: int
    calls: int
    median: int
    bus: float


def item_bytes(name: str) -> int | None:
    """Return the bytes of an element of a type, None for an unknown one."""
    return ITEM_BYTES.get(name.removeprefix("c10::").lower())


def operator_rates(costs: Costs) -> list[OperatorRate]:
    """Return the operators that launched device work and have shapes, the most expensive first."""
    timeline = costs.timeline
    tree, events, device = timeline.tree, timeline.events, timeline.device
    launching = device.operator[costs.device_rows]
    known = launching >= 0
    # What an operator with counted operations calls, such as the library's own convolution, is its time.
    counted = events.where("name", HAVE_WORK.__contains__)[tree.rows]
    around = tree.inherited(np.where(counted, np.arange(len(counted)), MISSING))[launching[known]]
    operator = np.where(around >= 0, around, launching[known])
    spent = np.bincount(operator, costs.durations[known], len(tree.rows)).astype(np.int64)
    indices = np.flatnonzero(spent)
    rows = tree.rows[indices]
    codes = np.zeros(len(rows), np.int64)
    for column in ("name", "shapes", "types", "values"):
        own = events[column][rows] + 1
        if column == "values":
            own[~counted[indices]] = 0  # of others they are no part of the shape
        codes = np.unique(codes * (len(events.words[column]) + 1) + own, return_inverse=True)[1]
    _, first, inverse, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    times = np.bincount(inverse, spent[indices], len(first)).astype(np.int64)
    found = []
    for row, calls, time in zip(rows[first].tolist(), counts.tolist(), times.tolist(), strict=True):
        shapes, types = events.listed("shapes", row), events.listed("types", row)
        if not shapes:
            continue
        name, seconds = events.word("name", row), time / 1e9 / calls
        operations, moved = work(name, shapes, events.listed("values", row)), _moved(name, shapes, types)
        found.append(
            OperatorRate(
                name, json.dumps(shapes), ", ".join(str(kind) for kind in types if kind), calls, time,
                *(None if not amount else amount / seconds / 1e12 for amount in (operations, moved)),
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: -one.device)


def _moved(name: str, shapes: Sequence[Any], types: Sequence[Any]) -> int | None:
    """Return the bytes of the inputs and the output."""
    both = matrices(name, shapes)
    # What operators of other libraries read of their inputs is not known: a cache is not copied as a whole.
    is_plain = name.startswith("aten::") and kind_of(name) in {Kind.ELEMENTWISE, Kind.COPY}
    if both is None and not is_plain:
        return None
    sizes = [
        (math.prod(shape), item_bytes(str(kind)))
        for shape, kind in zip(shapes, types, strict=False)
        if is_shape(shape) and shape
    ]
    if not sizes or any(size is None for _, size in sizes):
        return None
    read = sum(count * (size or 0) for count, size in sizes)
    if name == "aten::copy_":
        return int(read)  # its first input is the target
    largest, size = max(sizes)
    if both is not None:
        largest = math.prod(both[0][:-1]) * both[1][-1]
    return int(read + largest * (size or 0))


def copy_rates(costs: Costs) -> list[CopyRate]:
    """Return the bandwidth of copies and fills by name, the largest volume first."""
    device, events = costs.timeline.device, costs.timeline.events
    rows = costs.device_rows[events.among(MEMCPY | MEMSET)[device.rows[costs.device_rows]]]
    rows = rows[events["bytes"][device.rows[rows]] > 0]
    names, size = events["name"][device.rows[rows]], events["bytes"][device.rows[rows]]
    length = np.maximum((device.end - device.start)[rows], 1)
    found = []
    for code in np.unique(names):
        here = names == code
        rate = size[here] / length[here]
        whole = int(size[here].sum())
        found.append(
            CopyRate(
                events.words["name"][int(code)], int(here.sum()), whole,
                float(rate.min()), whole / float(length[here].sum()), float(rate.max()),
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: -one.bytes)


def collective_rates(costs: Costs) -> list[CollectiveRate]:
    """Return the bandwidth of collectives whose elements, type and ranks are recorded, the largest first."""
    numbers = {costs.timeline.steps[index].number for index in costs.step_indices}
    groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for one in collectives(costs.timeline):
        if one.bytes and one.group and one.step in numbers:
            groups[one.operation or one.name, len(one.group), one.bytes].append(one.end - one.start)
    found = []
    for (name, ranks, size), lengths in groups.items():
        median = int(np.median(lengths))
        factor = next((kind for part, kind in _FACTORS if part in name.lower()), "")
        times = {"2n": 2 * (ranks - 1) / ranks, "n": (ranks - 1) / ranks}.get(factor, 1.0)
        # What is gathered is as many times larger than what one rank gives.
        total = size * ranks if "gather" in name.lower() else size
        found.append(CollectiveRate(name, ranks, size, len(lengths), median, times * total / max(median, 1)))
    return sorted(found, key=lambda one: -one.bytes * one.calls)
