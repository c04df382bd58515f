"""What ranks say one by one: which of them are out of step, and which of them a bad value came from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.records import Evidence
from backlight.store.read.run import Run

SHOWN = 16
"""Ranks that are looked at one by one, at most: of a thousand, the first will do."""


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


@dataclass(frozen=True)
class RankLimits(Limits, monitor="health"):
    """How long ranks must differ."""

    apart_steps: int = limit(
        2,
        "recorded steps at which ranks must be apart: what is different once may be a step that one of them "
        "was just writing",
        low=1,
    )


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


def blamed(run: Run, step: int) -> tuple[int | None, str, tuple[Evidence, ...]]:
    """Return the rank from which values that are not finite came at a step, in words, and the evidence.

    Nothing where one process trained, or where all ranks had them and no loss says who was first.
    """
    ranks = run.attempts[-1].ranks[:SHOWN] if run.attempts else ()
    if len(ranks) < 2:
        return None, "", ()
    bad = {rank: count for rank in ranks if (count := _non_finite(run, rank, step))}
    if bad and len(bad) < len(ranks):
        text = ", ".join(f"{rank} ({count})" for rank, count in bad.items())
        paths = tuple(
            Evidence(f"series/gradient/non_finite, rank {rank}", step, count) for rank, count in bad.items()
        )
        who = f"Only {'rank' if len(bad) == 1 else 'ranks'} {text} of {len(ranks)} held such values."
        return (next(iter(bad)) if len(bad) == 1 else None), who, paths
    loss = run.spread("loss")
    row = np.flatnonzero(loss.steps == step)
    if not len(row):
        return None, "", ()
    ill = [
        (rank, float(loss.values[row[0], r]))
        for r, rank in enumerate(loss.ranks)
        if loss.logged[row[0], r] and not np.isfinite(loss.values[row[0], r])
    ]
    if not ill or len(ill) == int(loss.logged[row[0]].sum()):
        return None, "", ()
    names = ", ".join(str(rank) for rank, _ in ill)
    who = (
        f"Only the loss of {'rank' if len(ill) == 1 else 'ranks'} {names} of {len(loss.ranks)} was not "
        "finite: its batch brought it in, and the reduction of the gradients took it to all ranks."
    )
    found = tuple(
        Evidence(f"scalars/loss, rank {rank}", step, phrases.plain(value), "loss") for rank, value in ill
    )
    return (ill[0][0] if len(ill) == 1 else None), who, found


def _non_finite(run: Run, rank: int, step: int) -> int:
    frame = run.frame("gradient", "non_finite", rank=rank)
    row = np.flatnonzero(frame.steps == step)
    return int(frame.values[row[0]][frame.measured[row[0]]].sum()) if len(row) else 0
