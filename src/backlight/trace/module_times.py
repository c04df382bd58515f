"""Time of the traced steps by module, forward and backward.

The forward of a module is a range in the trace. Backward has no such ranges, but every operation that
autograd recorded carries a sequence number, and the node that differentiates it carries the same: the module
of the operation is that of the node (the link that torch.profiler uses).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from backlight.records import Phase
from backlight.trace.classification import ANNOTATION, ENGINE, OPERATOR
from backlight.trace.events import COMPLETE, Events

PHASE = "backlight:"
"""Prefix of the range of a phase."""

MODULE = "backlight.module/"
"""Prefix of the range of a module; the model itself has the empty name."""


@dataclass
class ModuleTime:
    """Host seconds of one module per step; ``exclusive`` times leave out the modules inside.

    ``recomputed`` is forward time inside backward, the cost of checkpointing; it is a part of backward.
    """

    name: str
    calls: float = 0.0
    forward: float = 0.0
    forward_exclusive: float = 0.0
    recomputed: float = 0.0
    backward: float = 0.0
    backward_exclusive: float = 0.0


@dataclass(frozen=True)
class Attribution:
    """Times by module, and the backward time without a module.

    Attributes
    ----------
    modules:
        In the order of their first call.
    backward:
        Seconds per step inside nodes of backward, attributed or not.
    unattributed:
        Those of nodes whose forward ran in no module (the loss, sums of gradients, the engine).
    """

    modules: tuple[ModuleTime, ...]
    backward: float
    unattributed: float


@dataclass
class _Span:
    start: int
    end: int
    name: str
    row: int
    parent: _Span | None
    inside: int = 0


def attribute(events: Events, steps: int) -> Attribution:
    """Attribute host time to modules.

    Parameters
    ----------
    events:
        Events of a trace with ranges by :mod:`backlight.diagnose.profile.ranges`.
    steps:
        Steps that the trace covers; times are per step.

    Raises
    ------
    ValueError
        If ``steps`` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: expected the number of traced steps, 1 or more")
    backwards = [
        (span.start, span.end) for spans in _spans(events, PHASE).values() for span in spans
        if span.name == Phase.BACKWARD
    ]  # fmt: skip
    by_thread = _spans(events, MODULE)
    times: dict[str, ModuleTime] = {}
    scale = 1e-9 / steps
    for span in sorted((s for spans in by_thread.values() for s in spans), key=lambda span: span.start):
        time = times.setdefault(span.name, ModuleTime(span.name))
        seconds = (span.end - span.start) * scale
        if _within(span.start, backwards):
            time.recomputed += seconds if span.parent is None or span.parent.name != span.name else 0.0
            continue
        time.calls += 1 / steps
        # A module inside itself (recursion) is counted once.
        if not any(outer.name == span.name for outer in _above(span)):
            time.forward += seconds
        time.forward_exclusive += seconds - span.inside * scale
    whole, missing = _backward(events, by_thread, backwards, times, scale)
    for time in times.values():
        time.backward = sum(
            other.backward_exclusive for other in times.values() if _is_inside(other.name, time.name)
        )
    return Attribution(tuple(times.values()), whole, missing)


def _backward(
    events: Events,
    by_thread: dict[tuple[int, int], list[_Span]],
    backwards: Sequence[tuple[int, int]],
    times: dict[str, ModuleTime],
    scale: float,
) -> tuple[float, float]:
    owners = _owners(events, by_thread, backwards)
    whole = missing = 0.0
    for spans in _spans(events, ENGINE, categories=OPERATOR).values():
        for span in spans:
            seconds = (span.end - span.start - span.inside) * scale
            whole += seconds
            owner = owners.get(int(events["sequence"][span.row]))
            if owner is None:
                missing += seconds
            else:
                times[owner].backward_exclusive += seconds
    return whole, missing


def _owners(
    events: Events, by_thread: dict[tuple[int, int], list[_Span]], backwards: Sequence[tuple[int, int]]
) -> dict[int, str]:
    """Return the innermost module of each sequence number that an operation of a forward has."""
    chosen = (events["kind"] == COMPLETE) & (events["sequence"] >= 0)
    rows = np.flatnonzero(chosen & events.where("name", lambda word: not word.startswith(ENGINE)))
    owners: dict[int, str] = {}
    grouped: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows[np.argsort(events["start"][rows], kind="stable")]:
        grouped[int(events["process"][row]), int(events["thread"][row])].append(int(row))
    for key, members in grouped.items():
        spans = iter(by_thread.get(key, ()))
        following = next(spans, None)
        opened: list[_Span] = []
        for row in members:
            start = int(events["start"][row])
            while following is not None and following.start <= start:
                opened.append(following)
                following = next(spans, None)
            opened = [span for span in opened if span.end > start]
            inside_node = _within(start, backwards)
            # The innermost module wins, and within it the last operation: numbers are given on the way out.
            if opened and (not inside_node or int(events["sequence"][row]) not in owners):
                owners[int(events["sequence"][row])] = opened[-1].name
    return owners


def _spans(
    events: Events, prefix: str, categories: frozenset[str] = ANNOTATION
) -> dict[tuple[int, int], list[_Span]]:
    """Return the nested ranges whose name begins with ``prefix``, by process and thread, by start."""
    named = events.where("name", lambda word: word.startswith(prefix))
    rows = np.flatnonzero(named & events.complete(categories))
    order = np.lexsort((-events["duration"][rows], events["start"][rows]))
    found: dict[tuple[int, int], list[_Span]] = defaultdict(list)
    stacks: dict[tuple[int, int], list[_Span]] = defaultdict(list)
    for row in rows[order].tolist():
        key = int(events["process"][row]), int(events["thread"][row])
        start = int(events["start"][row])
        end = start + max(0, int(events["duration"][row]))
        stack = stacks[key]
        while stack and stack[-1].end <= start:
            stack.pop()
        parent = stack[-1] if stack else None
        span = _Span(start, end, events.word("name", row)[len(prefix) :], row, parent)
        if parent is not None:
            parent.inside += end - start
        stack.append(span)
        found[key].append(span)
    return found


def _above(span: _Span) -> Iterator[_Span]:
    while span.parent is not None:
        span = span.parent
        yield span


def _within(time: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= time < end for start, end in spans)


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")
