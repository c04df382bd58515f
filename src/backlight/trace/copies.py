"""Copies between host and device and between types, with the line of Python that caused them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from backlight.trace.classification import MEMCPY
from backlight.trace.events import MISSING, Integers
from backlight.trace.operators import Costs, joined
from backlight.user_code import is_user_code

LINE = "backlight.line/"
"""Prefix of a range that names the line of Python that called the operators in it."""

_PYTHON_LINE = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.*)$")


@dataclass(frozen=True)
class DeviceCopies:
    """Copies that the device made, by direction: ``Memcpy HtoD (Pageable -> Device)``."""

    name: str
    calls: int
    bytes: int | None
    device: int


@dataclass(frozen=True)
class Copy:
    """Calls of ``aten::copy_`` of one kind, in nanoseconds.

    ``contiguous`` is whether source and target have equal strides. ``line`` is that of the user's code, for a
    copy in backward that of its forward; of a function torch records the first line. Types and line are
    empty, layout and elements None, where the trace lacks them.
    """

    source: str
    target: str
    contiguous: bool | None
    line: str
    calls: int
    elements: int | None
    host: int
    device: int
    share: float


def transfers(costs: Costs) -> list[DeviceCopies]:
    """Return the work of the device's copy engines, by name; time as part of the union."""
    device, events = costs.timeline.device, costs.timeline.events
    copies = events.among(MEMCPY)[device.rows[costs.device_rows]]
    rows = device.rows[costs.device_rows][copies]
    time = costs.shares[copies]
    table = []
    for code in np.unique(events["name"][rows]):
        here = events["name"][rows] == code
        size = events["bytes"][rows[here]]
        total = int(size[size >= 0].sum()) if (size >= 0).any() else None
        table.append(
            DeviceCopies(events.words["name"][int(code)], int(here.sum()), total, int(time[here].sum()))
        )
    return sorted(table, key=lambda transfer: transfer.device, reverse=True)


def copies(costs: Costs, device: Integers) -> list[Copy]:
    """Return copies by types, layout and line; ``device`` is from :func:`device_time`."""
    timeline = costs.timeline
    tree, events = timeline.tree, timeline.events
    wanted = events.where("name", lambda word: word == "aten::copy_")
    indices = costs.host_rows[wanted[tree.rows[costs.host_rows]]]
    rows = tree.rows[indices]
    # Few combinations are many copies; what their texts state is read once.
    by_code: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    codes = (events[name][rows].tolist() for name in ("types", "strides"))
    for index, *key in zip(indices.tolist(), *codes, _lines(costs, indices), strict=True):
        by_code[tuple(key)].append(index)
    groups: dict[tuple[str, str, bool | None, str], list[int]] = defaultdict(list)
    for (_, _, line), members in by_code.items():
        row = int(tree.rows[members[0]])
        types, strides = events.listed("types", row), events.listed("strides", row)
        source, target = (str(types[1]), str(types[0])) if len(types) > 1 else ("", "")
        is_same = bool(strides[0] == strides[1]) if len(strides) > 1 else None
        groups[source, target, is_same, line] += members
    by_types = []
    for (source, target, contiguous, line), members in groups.items():
        here = np.array(members)
        shapes = events["shapes"][tree.rows[here]]
        _, first, counts = np.unique(shapes, return_index=True, return_counts=True)
        sizes = (_elements(events.listed("shapes", int(row))) for row in tree.rows[here[first]])
        moved = [size * count for size, count in zip(sizes, counts.tolist(), strict=True) if size is not None]
        host, spent = int((tree.end - tree.start)[here].sum()), int(device[here].sum())
        by_types.append(
            Copy(
                source, target, contiguous, line, len(members), sum(moved) if moved else None, host, spent,
                costs.share(host, spent),
            )
        )  # fmt: skip
    return sorted(by_types, key=lambda copy: (copy.device, copy.host), reverse=True)


def _lines(costs: Costs, indices: Integers) -> list[str]:
    """Return the Python line of each index: of a range, its call stack, or the functions around it."""
    tree, events = costs.timeline.tree, costs.timeline.events
    ranges = any(word.startswith(LINE) for word in events.words["name"])
    forwards = dict(zip(*(part.tolist() for part in reversed(joined(costs))), strict=True)) if ranges else {}
    calls = [*map(_line, events.words["name"]), ""]
    here = np.array([at if line else MISSING for at, line in enumerate(calls)])
    around = tree.inherited(here[events["name"][tree.rows]])[indices]
    stacks = events["stack"][tree.rows[indices]].tolist()
    of_stack = {code: _line(events.words["stack"][code]) if code >= 0 else "" for code in set(stacks)}
    return [
        (_of_range(costs, index, forwards) if ranges else "") or of_stack[stack] or calls[call]
        for index, stack, call in zip(indices.tolist(), stacks, around.tolist(), strict=True)
    ]


@lru_cache(2**14)
def _line(stack: str) -> str:
    """Return the first location in a call stack, or in the name of one call."""
    return next(filter(None, map(_location, re.split(r"[;\n]", stack))), "")


def _of_range(costs: Costs, index: int, forwards: Mapping[int, int]) -> str:
    """Return the line of the innermost range around a index; inside a node of backward, of its forward."""
    tree, events = costs.timeline.tree, costs.timeline.events
    ending = ""
    for outer in tree.upwards(index):
        name = events.word("name", int(tree.rows[outer]))
        if name.startswith(LINE):
            return name.removeprefix(LINE) + ending
        if outer in forwards and not ending:
            line = _of_range(costs, forwards[outer], {})
            return f"{line}, backward" if line else ""
    return ""


@cache
def _location(frame: str) -> str:
    """Return file, line and function of a frame of the user's code, empty for any other."""
    match = _PYTHON_LINE.match(frame.strip())
    # The profiler cuts the folder of installed packages off.
    if not match or match["file"].startswith(("torch/", "backlight/")) or not is_user_code(match["file"]):
        return ""
    return f"{match['file']}:{match['line']} ({match['function']})"


def _elements(shapes: list[Any]) -> int | None:
    """Return the elements of the target, the first input."""
    if not shapes or not isinstance(shapes[0], list) or any(not isinstance(side, int) for side in shapes[0]):
        return None
    return math.prod(shapes[0])
