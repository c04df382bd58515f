"""Ranks that took other steps than the others, from the backward passes that each has run. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from backlight.store.read.run import Run


@dataclass(frozen=True)
class OutOfStep:
    """Ranks whose steps are not those of the others from ``step`` on.

    ``seen`` is how many backward passes each rank had seen by then; ``common`` is what most had.
    """

    step: int
    ranks: tuple[int, ...]
    seen: dict[int, int]
    common: int
    steps: int


def out_of_step(run: Run) -> OutOfStep | None:
    """Return from where on ranks that began together were at other places at the same count of steps.

    Ranks that differ from their first step on, such as those of some pipelines, say nothing by it.
    """
    places = run.spread("backwards_seen", attempt=run.attempts[-1].index) if run.attempts else None
    if places is None or len(places.ranks) < 2:
        return None
    whole = places.logged.all(axis=1)
    seen_SR, steps = places.values[whole], places.steps[whole]
    differ = (seen_SR != seen_SR[:, :1]).any(axis=1)
    if not len(steps) or differ[0] or not differ.any():
        return None
    row = int(np.flatnonzero(differ)[0])
    counts = seen_SR[row].astype(int).tolist()
    # Where there is no majority: who has seen more backward passes took fewer steps.
    common = max(Counter(counts).items(), key=lambda item: (item[1], -item[0]))[0]
    ranks = tuple(r for r, count in zip(places.ranks, counts, strict=True) if count != common)
    seen = dict(zip(places.ranks, counts, strict=True))
    return OutOfStep(int(steps[row]), ranks, seen, int(common), int(differ.sum()))
