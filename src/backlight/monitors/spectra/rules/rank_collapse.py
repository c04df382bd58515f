"""Rule ``rank_collapse``: the update of a layer has become nearly one direction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from backlight.findings.limits import Limits, limit
from backlight.findings.phrases import number
from backlight.monitors.spectra.model.layer_history import (
    Hit,
    evidence,
    layer_histories,
    other_layers,
    worst_first,
)
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class RankCollapseLimits(Limits, monitor="spectra"):
    """Limits of the rule ``rank_collapse``."""

    collapse_rank: float = limit(
        1.5,
        "an update of stable rank below this is nearly one direction, whatever the shape of the layer",
        low=1.0,
    )
    collapse_share: float = limit(0.25, "the update has lost three quarters of its earlier rank", high=1.0)


@rule("rank_collapse", monitor="spectra", limits=RankCollapseLimits, restates=True)
def rank_collapse(run: Run, limits: RankCollapseLimits) -> Iterator[Finding]:
    """Compare the stable rank of the last update of each layer with its earlier ones."""
    histories = layer_histories(run)
    hits, before = [], {}
    for history in histories:
        ranks = [one["stable_rank_update"] for one in history.measured]
        bound = collapse_bound(ranks[-1], ranks[:-1], limits)
        if bound is not None:
            hits.append(Hit(history.layer, history.last, ranks[-1], bound))
            before[history.name] = np.nanmax(ranks[:-1])
    if not hits:
        return
    shown = worst_first(hits, lambda hit: -hit.value)
    first = shown[0]
    name = first.layer.parameter
    yield Finding(
        severity=Severity.WARNING,
        title=f"The update of `{name}` collapsed to stable rank {number(first.value)}",
        detail=(
            f"The update of `{name}`{other_layers(len(hits), len(histories))} has stable rank "
            f"{number(first.value)} at step {first.at.step}; it was up to {number(before[name])} before. "
            "Nearly all of the update is one direction."
        ),
        subject=Subject(parameter=name, module=first.layer.layer or None, step=first.at.step),
        evidence=evidence(shown, "stable_rank_update"),
        fix=(
            "Compare the stable ranks of gradient and momentum: if the gradient collapsed too, inspect the "
            "batch (one token or class in all samples); if not, inspect the state of the optimizer."
        ),
        refuted_if=(f"updates of `{name}` at nearby steps have a stable rank above {number(first.limit)}."),
    )


def collapse_bound(rank: float, earlier: Sequence[float], limits: RankCollapseLimits) -> float | None:
    """Return the bound that a rank is below, given those of earlier steps; None if it has not collapsed."""
    known = [one for one in earlier if not math.isnan(one)]
    if math.isnan(rank) or not known:
        return None
    bound = min(limits.collapse_rank, limits.collapse_share * float(np.median(known)))
    return bound if rank < bound else None
