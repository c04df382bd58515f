"""Rule ``replicas_differ``: ranks whose gradients or weights differ, or that are out of step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.health.model.history import finite_median
from backlight.monitors.health.model.score import ROUNDING_SHARE
from backlight.records import Evidence, Finding, Layout, Severity, Subject
from backlight.registry import rule
from backlight.store.read.frames import placement
from backlight.store.read.run import Frame, Run
from backlight.text import count

MAX_RANKS = 16
"""Ranks that are read one by one, at most: of a thousand, the first suffice."""


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
    """Time for which ranks must differ."""

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


def _out_of_step(found: OutOfStep) -> Finding:
    """Report ranks that have seen another number of backward passes at the same count of optimizer steps."""
    one = len(found.ranks) == 1
    who = f"{'Rank' if one else 'Ranks'} {', '.join(map(str, found.ranks[:8]))}"
    counts = ", ".join(str(found.seen[rank]) for rank in found.ranks[:8])
    others = [rank for rank in found.seen if rank not in found.ranks]
    return Finding(
        severity=Severity.ERROR,
        title=f"{who} {'is' if one else 'are'} out of step with the others from step {found.step} on",
        detail=(
            f"{who} had run {counts} backward passes at the end of step {found.step}, the others "
            f"{found.common}: {'it' if one else 'they'} skipped or added an optimizer step, or accumulated "
            f"differently. In the {count(found.steps, 'recorded step')} since, equal step numbers "
            "mean different steps, so the replicas drift apart."
        ),
        subject=Subject(step=found.step, rank=found.ranks[0] if one else None),
        evidence=tuple(
            Evidence(f"scalars/backwards_seen, rank {rank}", found.step, found.seen[rank], "1")
            for rank in (*found.ranks[:4], *others[:2])
        ),
        fix=(
            "Find the condition around `optimizer.step()` that each rank decides alone (its loss, its shard, "
            "an empty batch), and reduce it over all ranks first."
        ),
        refuted_if="the ranks accumulate different numbers of microbatches per step by design.",
    )


Bools = NDArray[np.bool_]

COLUMNS = (("gradient", "norm", "gradient"), ("update", "weight_norm", "weight"))
"""What is compared, in this order: weights drift where gradients do."""


@rule("replicas_differ", monitor="health", version=2, limits=RankLimits)
def replicas_differ(run: Run, limits: RankLimits) -> Iterator[Finding]:
    """Find ranks out of step, and whole or replicated parameters of which ranks measured different norms."""
    if not run.attempts or len(run.attempts[-1].ranks) < 2:
        return
    late = out_of_step(run)
    if late is not None and late.steps >= limits.apart_steps:
        yield _out_of_step(late)
    for series, column, unit in COLUMNS:
        if not run.has(series):
            continue
        frame = run.frame(series, column, attempt=run.attempts[-1].index)
        apart_SP = frame.incomplete() & _replicated(run, frame, series)
        if late is not None:
            apart_SP &= (frame.steps < late.step)[:, None]
        if not apart_SP.any():
            continue
        local_RSP = _local(run, frame, series, column)
        apart_SP &= ~_within_rounding(local_RSP)
        if apart_SP.any(axis=1).sum() >= limits.apart_steps:
            yield _finding(run, frame, apart_SP, local_RSP, series, column, unit)
            return


def _replicated(run: Run, frame: Frame, series: str) -> Bools:
    layouts = {p.name: placement(p, series).layout for p in run.parameters()}
    same = {Layout.WHOLE, Layout.REPLICATE}
    return np.array([layouts.get(name) in same for name in frame.names], dtype=bool)


def _local(run: Run, frame: Frame, series: str, column: str) -> NDArray[np.float64]:
    """Return what each rank measured on its own, NaN where it did not."""
    ranks, attempt = run.attempts[-1].ranks[:MAX_RANKS], run.attempts[-1].index
    local_RSP = np.full((len(ranks), *frame.values.shape), np.nan)
    for i, rank in enumerate(ranks):
        local = run.frame(series, column, attempt=attempt, rank=rank)
        _, here, there = np.intersect1d(frame.steps, local.steps, return_indices=True)
        local_RSP[i][here] = np.where(local.measured[there], local.values[there], np.nan)
    return local_RSP


def _ends(local_RSP: NDArray[np.float64]) -> tuple[Bools, NDArray[np.float64], NDArray[np.float64]]:
    """Return what is finite, and the smallest and the largest finite value over ranks."""
    finite = np.isfinite(local_RSP)
    low_SP = np.where(finite, local_RSP, np.inf).min(axis=0)
    return finite, low_SP, np.where(finite, local_RSP, -np.inf).max(axis=0)


def _within_rounding(local_RSP: NDArray[np.float64]) -> Bools:
    """Return where ranks differ by less than the rounding error of the other values of the step.

    A gradient that is zero but for rounding, as that of a bias before a batch norm, is another on each rank.
    """
    finite, low_SP, high_SP = _ends(local_RSP)
    median_S = finite_median(np.where(np.isfinite(high_SP) & (high_SP > 0), high_SP, np.nan))
    with np.errstate(invalid="ignore"):
        close = high_SP - low_SP < ROUNDING_SHARE * median_S[:, None]
    return np.asarray(close & finite.all(axis=0), dtype=np.bool_)


def _finding(
    run: Run, frame: Frame, apart_SP: Bools, found: NDArray[np.float64], series: str, column: str, unit: str
) -> Finding:
    columns = np.flatnonzero(apart_SP.any(axis=0))
    known = int((frame.measured | apart_SP).any(axis=0).sum())
    first = int(frame.steps[np.flatnonzero(apart_SP.any(axis=1))[0]])
    steps = int(apart_SP.any(axis=1).sum())
    worst = _worst(apart_SP, found)
    name, at, ranks = frame.names[worst[1]], int(frame.steps[worst[0]]), run.attempts[-1].ranks
    values = found[:, worst[0], worst[1]]
    by_rank = [(rank, float(v)) for rank, v in zip(ranks, values, strict=False) if not np.isnan(v)]
    what = "gradients" if series == "gradient" else "weights"
    said = ", ".join(f"{phrases.number(v)} on rank {r}" for r, v in by_rank[:4])
    everything = len(columns) == known
    if len(_sizes(run, series, worst[1])) > 1:
        cause = "Their sizes differ: only the names are equal."
        check = "Name the tensors of each rank differently, or shard them with DTensor."
    elif everything and series == "gradient":
        cause = "Nothing reduces the gradients: each rank trains on its own batches."
        check = (
            "Call the model that DistributedDataParallel returned, and run the last backward before a step "
            "outside `no_sync()`."
        )
    elif series == "gradient":
        cause = "The other gradients agree, so these parameters are left out of the reduction."
        check = (
            "Create DDP after all parameters exist and require gradients; check which parameters DDP ignores."
        )
    else:
        cause = (
            "Their gradients agree: the weights started different, or something other than the optimizer "
            "changed them."
        )
        check = (
            "Broadcast the weights of rank 0 before training, and find what runs on one rank only: loading a "
            "checkpoint, an initialisation, an optimizer hook."
        )
    return Finding(
        severity=Severity.WARNING if everything else Severity.ERROR,
        title=f"Replicated {what} differ between ranks from step {first} on",
        detail=(
            f"{phrases.share(len(columns), known, 'parameters')} differ in "
            f"{count(steps, 'recorded step')}. The largest difference is in `{name}` at step "
            f"{at}: norm {said}. {cause}"
        ),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name), step=first),
        evidence=tuple(
            Evidence(f"series/{series}/{column}/{name}, rank {r}", at, phrases.plain(v), unit)
            for r, v in by_rank[: phrases.EVIDENCE_ROWS]
        ),
        fix=check,
        refuted_if="the ranks diverge by design between averaging steps (local SGD).",
    )


def _worst(apart_SP: Bools, found: NDArray[np.float64]) -> tuple[int, int]:
    """Return row and column of the value in which ranks are furthest apart."""
    finite, low, high = _ends(found)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(apart_SP & (finite.sum(axis=0) > 1), (high - low) / np.maximum(high, 1e-300), -1.0)
    s, p = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    if ratio[s, p] < 0:  # none of the ranks looked at has a number that can be compared
        s, p = np.argwhere(apart_SP)[0]
    return int(s), int(p)


def _sizes(run: Run, series: str, column: int) -> set[int]:
    """Return how many values the parameter of a column has on each rank that measured it."""
    locals_ = [
        run.frame(series, "numel", attempt=run.attempts[-1].index, rank=rank)
        for rank in run.attempts[-1].ranks[:MAX_RANKS]
    ]
    rows = [(one, np.flatnonzero(one.measured[:, column])) for one in locals_]
    return {int(one.values[row[0], column]) for one, row in rows if len(row)}
