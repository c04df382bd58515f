"""Copies between host and device and between types, with the line of Python that caused them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import MEMCPY, PYTHON
from backlight.trace.events import Events, Integers
from backlight.trace.operators import Costs, joined

LINE = "backlight.line/"
"""Prefix of a range that names the line of Python that called the operators in it."""

_PYTHON_LINE = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.*)$")
_IGNORED_FRAMES = re.compile(r"(^|/)(torch|backlight)/")


@dataclass(frozen=True)
class Transfer:
    """Copies that the device made, by direction: ``Memcpy HtoD (Pageable -> Device)``."""

    name: str
    calls: int
    bytes: int | None
    device: int


@dataclass(frozen=True)
class Copy:
    """Calls of ``aten::copy_`` of one kind.

    Attributes
    ----------
    source, target:
        Types as the profiler writes them, empty where it recorded no shapes.
    contiguous:
        Whether source and target have equal strides; None where none were recorded.
    line:
        Python function and line of the nearest frame outside torch, empty where the trace has neither ranges
        of lines, stacks nor Python functions; for a copy in backward the line of its forward, where only
        ranges are recorded. For a function torch records its first line; for one that was running when the
        recording began, the line that it had reached.
    calls, elements, host, device:
        Number, elements in all (None without shapes), nanoseconds on host and device.
    share:
        Part of the busy time of the device, or of the host where there is none.
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


def transfers(costs: Costs) -> list[Transfer]:
    """Return the work of the device's copy engines, by name; time as part of the union."""
    device, events = costs.timeline.device, costs.timeline.events
    copies = events.complete(MEMCPY)[device.rows[costs.device_rows]]
    rows = device.rows[costs.device_rows][copies]
    time = costs.shares[copies]
    found = []
    for code in np.unique(events["name"][rows]):
        here = events["name"][rows] == code
        size = events["bytes"][rows[here]]
        known = int(size[size >= 0].sum()) if (size >= 0).any() else None
        found.append(Transfer(events.words["name"][int(code)], int(here.sum()), known, int(time[here].sum())))
    return sorted(found, key=lambda one: one.device, reverse=True)


def copies(costs: Costs, device: Integers) -> list[Copy]:
    """Return copies by types, layout and line; ``device`` is from :func:`device_time`."""
    timeline = costs.timeline
    tree, events = timeline.tree, timeline.events
    wanted = events.where("name", lambda word: word == "aten::copy_")
    indices = costs.host_rows[wanted[tree.rows[costs.host_rows]]]
    groups: dict[tuple[str, str, bool | None, str], list[int]] = defaultdict(list)
    lines = _lines(costs, indices)
    for index, line in zip(indices.tolist(), lines, strict=True):
        row = int(tree.rows[index])
        types = _strings(events.word("types", row))
        source, target = (types[1], types[0]) if len(types) > 1 else ("", "")
        groups[source, target, _same_strides(events, row), line].append(index)
    found = []
    for (source, target, contiguous, line), members in groups.items():
        here = np.array(members)
        elements = [_elements(events.word("shapes", int(row))) for row in tree.rows[here]]
        known = [count for count in elements if count is not None]
        host, spent = int((tree.end - tree.start)[here].sum()), int(device[here].sum())
        found.append(
            Copy(
                source, target, contiguous, line, len(members), sum(known) if known else None, host, spent,
                costs.share(host, spent),
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: (one.device, one.host), reverse=True)


def _lines(costs: Costs, indices: Integers) -> list[str]:
    """Return the Python line of each index: of a range, its call stack, or the functions around it."""
    timeline = costs.timeline
    tree, events = timeline.tree, timeline.events
    python = events.complete(PYTHON)[tree.rows]
    functions = bool(python.any())
    ranges = any(word.startswith(LINE) for word in events.words["name"])
    forwards = dict(zip(*(part.tolist() for part in reversed(joined(costs))), strict=True)) if ranges else {}
    lines = []
    for index in indices.tolist():
        line = _of_range(costs, index, forwards) if ranges else ""
        line = line or _of_stack(events.word("stack", int(tree.rows[index])))
        outer = int(tree.parent[index]) if functions and not line else -1
        while outer >= 0 and not line:
            name = events.word("name", int(tree.rows[outer])) if python[outer] else ""
            found = _PYTHON_LINE.match(name)
            if found and not _IGNORED_FRAMES.search(found["file"]):
                line = _location(found)
            outer = int(tree.parent[outer])
        lines.append(line)
    return lines


def _of_range(costs: Costs, index: int, forwards: Mapping[int, int]) -> str:
    """Return the line of the innermost range around a index; inside a node of backward, of its forward."""
    tree, events = costs.timeline.tree, costs.timeline.events
    ending = ""
    while index >= 0:
        name = events.word("name", int(tree.rows[index]))
        if name.startswith(LINE):
            return name.removeprefix(LINE) + ending
        if index in forwards and not ending:
            index, ending = forwards[index], ", backward"
        index = int(tree.parent[index])
    return ""


def _of_stack(stack: str) -> str:
    for frame in re.split(r"[;\n]", stack):
        found = _PYTHON_LINE.match(frame.strip())
        if found and not _IGNORED_FRAMES.search(found["file"]):
            return _location(found)
    return ""


def _location(frame: re.Match[str]) -> str:
    return f"{frame['file']}:{frame['line']} ({frame['function']})"


def _strings(text: str) -> list[str]:
    found = json.loads(text) if text else []
    return [str(one) for one in found] if isinstance(found, list) else []


def _elements(shapes: str) -> int | None:
    """Return the elements of the target, the first input."""
    found = json.loads(shapes) if shapes else []
    if not found or not isinstance(found[0], list) or any(not isinstance(side, int) for side in found[0]):
        return None
    return int(np.prod(found[0], dtype=np.int64))


def _same_strides(events: Events, row: int) -> bool | None:
    strides = events.word("strides", row)
    found = json.loads(strides) if strides else []
    return bool(found[0] == found[1]) if isinstance(found, list) and len(found) > 1 else None
