"""The logits that a loss was computed on: shape and type from the trace."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from backlight.trace import categories
from backlight.trace.events import Trace

_LOSSES = ("aten::cross_entropy_loss", "aten::_log_softmax", "aten::log_softmax")

_SIZES = {"double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2}


@dataclass(frozen=True)
class Logits:
    """The largest input of a cross entropy; ``itemsize`` in bytes, 4 where the type is not known."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int


def logits(trace: Trace) -> Logits | None:
    """Return the largest logits of a trace; None where it has no cross entropy with shapes."""
    events = trace.events
    wanted = categories.named(events, [word in _LOSSES for word in events.words["name"]])
    found: dict[tuple[int, ...], str] = {}
    for row in (wanted & categories.rows(events, categories.OPERATOR)).nonzero()[0].tolist():
        shapes, types = (json.loads(events.word(key, row) or "[]") for key in ("shapes", "types"))
        if shapes and isinstance(shapes[0], list) and all(isinstance(n, int) for n in shapes[0]):
            found.setdefault(tuple(shapes[0]), str(types[0]) if types else "")
    if not found:
        return None
    largest = max(found, key=math.prod)
    kind = found[largest]
    return Logits(largest, kind.removeprefix("c10::").lower(), _SIZES.get(kind, 4))
