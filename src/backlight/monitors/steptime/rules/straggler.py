"""Rule ``straggler``: one rank works longer than the others, who wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backlight.monitors.steptime.model.phase_times import PREFIX, Recorded
from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import percent, steady_phases
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

WAITS = frozenset({Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER})
"""Phases in which collectives may wait for other ranks: their time says nothing of a rank's own work."""


@rule("straggler", monitor="steptime", thresholds=("steady_steps", "straggler_share"))
def straggler(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find a rank whose own phases last longer, while it waits less than the others in the shared ones.

    Ranks that step together take equally long for a step; the late one is told by where the time goes.
    """
    ranks = run.attempts[-1].ranks if run.attempts else ()
    tables = {rank: table for rank in ranks if (table := steady_phases(run, limits, rank)) is not None}
    if len(tables) < 2:
        return
    own = {rank: float(np.median(_own(table))) for rank, table in tables.items()}
    shared = {rank: float(np.median(table.total - _own(table))) for rank, table in tables.items()}
    step = float(np.median([np.median(table.total) for table in tables.values()]))
    late = max(sorted(own), key=lambda rank: own[rank])
    others = [rank for rank in tables if rank != late]
    excess = (own[late] - float(np.median([own[rank] for rank in others]))) / step
    waited = (float(np.median([shared[rank] for rank in others])) - shared[late]) / step
    # Both must hold: it works longer, and in what is shared the others wait for it.
    if excess <= limits.straggler_share or waited < excess / 2:
        return
    table, calm = tables[late], tables[others[0]]
    name = max(
        (n for n in table.names if n not in WAITS),
        key=lambda n: float(np.median(table.phase(n)) - np.median(calm.phase(n))),
    )
    yield Finding(
        severity=Severity.WARNING,
        title=f"Rank {late} works {percent(excess)} of a step longer than the others",
        detail=(
            f"Rank {late} works {percent(excess)} of a step longer than the others, mostly in "
            f"{name.replace('_', ' ')}, and they wait for it. Expected gain: at most {percent(excess)} of a "
            "step."
        ),
        subject=Subject(rank=late, phase=name),
        evidence=tuple(
            Evidence(
                f"scalars/{PREFIX}{name}", None, float(np.median(t.phase(name))), f"s, median of rank {r}"
            )
            for r, t in ((late, table), (others[0], calm))
        ),
        fix=(
            "Look at that rank: its share of the data, its machine (clock, temperature, neighbours), its "
            "loader. "
            "`backlight trace` on all ranks shows which collectives wait."
        ),
        refuted_if=(
            "with the ranks exchanged between machines, or with equal batches, it is no longer that rank."
        ),
    )


def _own(table: Recorded) -> np.ndarray:
    kept = [column for column, name in enumerate(table.names) if name not in WAITS]
    return np.asarray(table.seconds[:, kept].sum(axis=1))
