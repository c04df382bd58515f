"""Time of the traced steps by module, forward and backward.

The forward of a module is a range in the trace. Backward has no such ranges, but every operation that
autograd recorded carries a sequence number, and the node that differentiates it carries the same: the module
of the operation is that of the node (the link that torch.profiler uses).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.records import Phase
from backlight.trace.classification import ANNOTATION, ENGINE, OPERATOR, PHASES
from backlight.trace.classification import MODULE as STACK_MODULE
from backlight.trace.device_queues import TimeSpread
from backlight.trace.events import MISSING, Column, Events, Integers, Mask
from backlight.trace.intervals import union
from backlight.trace.operators import Costs, Row
from backlight.trace.timeline import Tree, tree

MIN_STEPS = 10
"""Fewer steps show no variation."""


@dataclass(frozen=True)
class Annotation:
    """One name; nanoseconds of the host, and of the device for what was launched inside.

    Annotations inside one of the same name count once; others are included in those around them. What it
    takes in a step, over the ``steps`` that it is in, is None for fewer than :data:`MIN_STEPS`, and on the
    device where there is none.
    """

    name: str
    calls: int
    host: int
    device: int
    share: float
    steps: int
    host_per_step: TimeSpread | None
    device_per_step: TimeSpread | None


def by_annotation(costs: Costs, launched: Integers) -> list[Annotation]:
    """Return the annotations of the chosen steps; ``launched`` is from ``device_time``."""
    timeline = costs.timeline
    tree, events = timeline.tree, timeline.events
    is_step = events.where("name", lambda word: word.startswith("ProfilerStep"))
    marked = events.among(ANNOTATION) & ~is_step
    rows = costs.host_rows[marked[tree.rows[costs.host_rows]]]
    names = events["name"][tree.rows]
    inner = [
        any(names[outer] == names[row] for outer in tree.upwards(int(tree.parent[row])))
        for row in rows.tolist()
    ]
    outermost = ~np.array(inner, dtype=bool)
    host, device = (tree.end - tree.start)[rows], launched[rows]
    steps = timeline.step_of(tree.start[rows])
    by_name = []
    for code in np.unique(names[rows]):
        here = names[rows] == code
        once = here & outermost
        spent, on_device = int(host[once].sum()), int(device[once].sum())
        numbers, at = np.unique(steps[once], return_inverse=True)
        per_step = [
            TimeSpread.of(np.bincount(at, time[once])) if len(numbers) >= MIN_STEPS else None
            for time in (host, device)
        ]
        by_name.append(
            Annotation(
                events.words["name"][int(code)], int(here.sum()), spent, on_device,
                costs.share(spent, on_device), len(numbers), per_step[0],
                per_step[1] if costs.on_device else None,
            )
        )  # fmt: skip
    return sorted(by_name, key=lambda annotation: (annotation.share, annotation.host), reverse=True)


PHASE = "backlight:"
"""Prefix of the range of a phase."""

MODULE = "backlight.module/"
"""Prefix of the range of a module; the model itself has the empty name."""


NO_MODULE = "(no module)"
"""Name of what runs in no module: losses, the optimizer, and backward of what no module computed."""


def by_module(costs: Costs) -> list[Row]:
    """Return the modules of a trace with their ranges, by phase; none of a trace without.

    Times are exclusive, and those of backward are of the module whose operation is differentiated. The name
    is the path of classes through the modules around it, which layers that repeat share.
    """
    timeline = costs.timeline
    tree, events = timeline.tree, timeline.events
    is_range = {word: prefix for word in events.words["name"] if (prefix := _prefix(word))}
    ranges = np.flatnonzero(events.where("name", is_range.__contains__)[tree.rows])
    if not len(ranges):
        return []
    codes: dict[str, int] = {}
    code = np.full(len(tree.rows), MISSING, np.int64)
    around = tree.inherited(_marked(len(tree.rows), ranges, ranges))
    paths: dict[int, str] = {}
    for index in ranges[np.argsort(tree.depth[ranges], kind="stable")].tolist():
        word = timeline.name(int(tree.rows[index]))
        outer = int(around[tree.parent[index]]) if tree.parent[index] >= 0 else MISSING
        name = word.removeprefix(is_range[word]) or "model"
        name = name.rpartition("_")[0] if is_range[word] == STACK_MODULE else name  # without its number
        # The ranges of backlight have the path in their name.
        is_inside = outer >= 0 and is_range[word] != MODULE
        paths[index] = f"{paths[outer]}.{name}" if is_inside else name
        code[index] = codes.setdefault(paths[index], len(codes))
    module = tree.inherited(code)
    ahead, behind = timeline.differentiated
    code[behind] = module[ahead]
    module = tree.inherited(code)
    names = [*codes, NO_MODULE]
    module = np.where(module < 0, len(codes), module)

    def label(key: int) -> tuple[str, str, str]:
        return names[key // len(PHASES)], PHASES[key % len(PHASES)].value, ""

    key = module * len(PHASES) + timeline.phases
    launcher = timeline.device.operator[costs.device_rows]
    on_device = np.where(
        launcher >= 0, key[launcher], len(codes) * len(PHASES) + timeline.device.phase[costs.device_rows]
    )
    here = costs.host_rows
    return costs.rows(key[here], on_device, label, counted=np.isin(here, ranges))


def _prefix(word: str) -> str:
    return next((prefix for prefix in (MODULE, STACK_MODULE) if word.startswith(prefix)), "")


def _marked(count: int, indices: Integers, values: Integers) -> Integers:
    marks = np.full(count, MISSING, np.int64)
    marks[indices] = values
    return marks


@dataclass
class ModuleTime:
    """Host milliseconds of one module per step; ``exclusive`` times leave out the modules inside.

    ``recomputed_ms`` is forward time inside backward, which checkpointing costs; it is a part of backward.
    """

    name: str
    calls: float = 0.0
    forward_ms: float = 0.0
    forward_exclusive_ms: float = 0.0
    recomputed_ms: float = 0.0
    backward_ms: float = 0.0
    backward_exclusive_ms: float = 0.0


@dataclass(frozen=True)
class Attribution:
    """Times by module in the order of their first call.

    ``unattributed_ms`` per step are inside nodes of backward whose forward ran in no module: the loss, sums
    of gradients, the engine.
    """

    modules: tuple[ModuleTime, ...]
    unattributed_ms: float


def attribute(events: Events, steps: int) -> Attribution:
    """Attribute the host time of ``steps`` traced steps to the modules whose ranges the trace has."""
    calls = tree(events)
    ranges = _named(events, calls, MODULE, ANNOTATION)
    around, exclusive = _nested(calls, ranges)
    names = [events.word("name", row)[len(MODULE) :] for row in calls.rows.tolist()]
    backward = _named(events, calls, f"{PHASE}{Phase.BACKWARD}", ANNOTATION)
    inside = union(calls.start[backward], calls.end[backward]).covered(calls.start, calls.start + 1) > 0
    scale = 1e-6 / steps
    times: dict[str, ModuleTime] = {}
    indices = np.flatnonzero(ranges)
    for index in indices[np.argsort(calls.start[indices], kind="stable")].tolist():
        name, outer = names[index], int(around[index])
        time = times.setdefault(name, ModuleTime(name))
        spent = int(calls.end[index] - calls.start[index]) * scale
        if inside[index]:
            time.recomputed_ms += spent if outer < 0 or names[outer] != name else 0.0
            continue
        time.calls += 1 / steps
        time.forward_exclusive_ms += int(exclusive[index]) * scale
        # A module inside itself (recursion) is counted once.
        while outer >= 0 and names[outer] != name:
            outer = int(around[outer])
        time.forward_ms += spent if outer < 0 else 0.0
    unattributed = 0.0
    owners = _owners(events, calls, around, inside)
    nodes = _named(events, calls, ENGINE, OPERATOR)
    exclusive = _nested(calls, nodes)[1]
    for index in np.flatnonzero(nodes).tolist():
        owner = owners.get(int(events["sequence"][calls.rows[index]]))
        if owner is None:
            unattributed += int(exclusive[index]) * scale
        else:
            times[names[owner]].backward_exclusive_ms += int(exclusive[index]) * scale
    for time in times.values():
        time.backward_ms = sum(
            other.backward_exclusive_ms
            for other in times.values()
            if not time.name or other.name == time.name or other.name.startswith(f"{time.name}.")
        )
    return Attribution(tuple(times.values()), unattributed)


def _named(events: Events, calls: Tree, prefix: str, categories: frozenset[str]) -> Mask:
    named = events.where("name", lambda word: word.startswith(prefix)) & events.among(categories)
    return named[calls.rows]


def _nested(calls: Tree, chosen: Column) -> tuple[Integers, Integers]:
    """Return the innermost chosen event around each one, and the time of each without the chosen inside."""
    innermost = calls.inherited(np.where(chosen, np.arange(len(chosen)), -1))
    around = np.where(calls.parent >= 0, innermost[calls.parent], -1)
    exclusive = calls.end - calls.start
    nested = chosen & (around >= 0)
    np.subtract.at(exclusive, around[nested], (calls.end - calls.start)[nested])
    return around, exclusive


def _owners(events: Events, calls: Tree, around: Integers, inside: Column) -> dict[int, int]:
    """Return the range of the module of each sequence number that an operation of a forward has."""
    sequence = events["sequence"][calls.rows]
    node = events.where("name", lambda word: word.startswith(ENGINE))[calls.rows]
    indices = np.flatnonzero((sequence >= 0) & ~node & (around >= 0))
    owners: dict[int, int] = {}
    for index in indices[np.argsort(calls.start[indices], kind="stable")].tolist():
        number = int(sequence[index])
        # The last operation of a forward wins: numbers are given on the way out.
        if not inside[index] or number not in owners:
            owners[number] = int(around[index])
    return owners
