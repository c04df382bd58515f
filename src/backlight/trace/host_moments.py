"""Host time of the steps, each moment once: the call that a step is in, over all threads of the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backlight.records import Phase
from backlight.trace.classification import PHASES, RUNTIME
from backlight.trace.events import Integers, Mask

if TYPE_CHECKING:
    from backlight.trace.timeline import Timeline, Tree


OUTSIDE = "outside any call"
"""Name of host time in no call of the trace."""


@dataclass(frozen=True)
class Moments:
    """Spans that fill the steps, by start, int64 [M] each.

    ``call`` is the index in the tree of the innermost call, -1 where the host is in no call; ``step`` the
    number of the step.
    """

    start: Integers
    end: Integers
    call: Integers
    step: Integers


def host_moments(timeline: Timeline) -> Moments:
    """Divide the steps among the calls of the host.

    The thread of the steps comes first while it is in an operator or in a call of the runtime, then the
    threads of backward, for which it waits, then what else it does, then the other threads.
    """
    tree = timeline.tree
    start, end, call = _spans(tree)
    is_working = (timeline.operators >= 0) | timeline.events.among(RUNTIME)[tree.rows]
    in_backward = is_working & (timeline.phases == PHASES.index(Phase.BACKWARD))
    main = _step_thread(timeline)
    others = [thread for thread in np.unique(tree.thread).tolist() if thread != main]
    thread = tree.thread[call]
    layers: list[Mask] = [
        (thread == main) & is_working[call],
        *((thread == other) & in_backward[call] for other in others),
        thread == main,
        *(thread == other for other in others),
    ]
    steps = timeline.steps
    limits = [limit for step in steps for limit in (step.start, step.end)]
    bounds = np.sort(np.concatenate((np.array(limits, dtype=np.int64), start, end)))
    bounds = bounds[np.diff(bounds, append=bounds[-1] + 1) > 0]
    step = timeline.step_of(bounds[:-1])
    inside = step >= 0
    begin, finish, step = bounds[:-1][inside], bounds[1:][inside], step[inside]
    owner = np.full(len(begin), -1, np.int64)
    for layer in layers:
        if not layer.any():
            continue
        free = np.flatnonzero(owner < 0)
        starts, ends, calls = start[layer], end[layer], call[layer]
        at = np.searchsorted(starts, begin[free], side="right") - 1
        is_open = (at >= 0) & (begin[free] < ends[at])
        owner[free[is_open]] = calls[at[is_open]]
    return Moments(begin, finish, owner, step)


def _spans(tree: Tree) -> tuple[Integers, Integers, Integers]:
    """Return start, end and call of the spans in which each call of a thread is the innermost, by start."""
    calls = np.arange(len(tree.rows))
    # A call runs until its first child; after a child, its parent runs until the next child or its own end.
    is_first = np.append(tree.parent[1:] == calls[:-1], False) if len(calls) else np.zeros(0, bool)
    until = tree.reached.copy()
    until[is_first] = tree.start[calls[is_first] + 1]
    nested = calls[tree.parent >= 0]
    nested = nested[np.lexsort((nested, tree.parent[nested]))]
    parent = tree.parent[nested]
    after = tree.reached[parent]
    has_next = parent[1:] == parent[:-1]
    after[:-1][has_next] = tree.start[nested[1:][has_next]]
    start = np.concatenate((tree.start, tree.reached[nested]))
    end = np.concatenate((until, after))
    call = np.concatenate((calls, parent))
    real = end > start
    order = np.argsort(start[real], kind="stable")
    return start[real][order], end[real][order], call[real][order]


def _step_thread(timeline: Timeline) -> int:
    """Return the thread of the step ranges; without steps, the one that is longest in calls."""
    tree = timeline.tree
    marks = tree.thread[timeline.step_marks[tree.rows]]
    if len(marks):
        return int(marks[0])
    threads, at = np.unique(tree.thread, return_inverse=True)
    return int(threads[np.bincount(at, tree.inner).argmax()]) if len(threads) else 0
