"""Operations of attention, from the shapes of its calls in a trace.

MFU counts 12 L d T operations of attention per token (Chowdhery et al., 2204.02311, appendix B): scores
and mixing take 4 T d per token and layer forward, and backward twice that; a causal mask is not
subtracted. Read from shapes, with batch B, heads H, lengths T and S, and D numbers a head, one call is
``12 B H T S D``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from backlight.records import Phase
from backlight.trace.classification import PHASES
from backlight.trace.events import Events, Trace
from backlight.trace.timeline import Timeline

_CALL = "aten::scaled_dot_product_attention"
_KERNELS = "aten::_scaled_dot_product_"


@dataclass(frozen=True)
class Attention:
    """Calls of attention per step, and their operations forward and backward; ``examples`` are shapes."""

    calls: float
    operations: float
    shape: str


def attention(trace: Trace, steps: int) -> Attention | None:
    """Return the operations of attention per step; None where no call with shapes is in the trace.

    Calls inside backward are recomputed ones, which MFU does not count.
    """
    timeline = Timeline(trace)
    events, tree = timeline.events, timeline.tree
    wanted = {
        code
        for code, word in enumerate(events.words["name"])
        if word == _CALL or (word.startswith(_KERNELS) and "backward" not in word)
    }
    if not wanted:
        return None
    among = np.isin(events["name"][tree.rows], list(wanted))
    # A kernel lies in the call that chose it, and is counted with it.
    above = tree.inherited(np.where(among, np.arange(len(among)), -1))
    outermost = among & ~np.where(tree.parent >= 0, above[tree.parent] >= 0, False)
    forward = timeline.phases != PHASES.index(Phase.BACKWARD)
    inside = timeline.step_of(tree.start) >= 0
    total, calls, shape = 0.0, 0, ""
    for place in np.flatnonzero(outermost & forward & inside):
        found = _sizes(events, int(tree.rows[place]))
        if found is not None:
            calls += 1
            total += found[0]
            shape = shape or found[1]
    return Attention(calls / steps, total / steps, shape) if calls else None


def _sizes(events: Events, row: int) -> tuple[float, str] | None:
    text = events.word("shapes", row)
    shapes = json.loads(text) if text else []
    if len(shapes) < 2 or any(not isinstance(s, list) or len(s) < 2 for s in shapes[:2]):
        return None
    query, key = shapes[0], shapes[1]
    length, size = query[-2:]
    batch = int(np.prod(query[:-2], dtype=np.int64))
    return 12.0 * batch * length * key[-2] * size, "x".join(map(str, query))
