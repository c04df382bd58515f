"""Rule ``straggler``: one rank works longer than the others, which wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings.limits import limit
from backlight.monitors.steptime.model.evidence import SteadyLimits, percent, steady_phases
from backlight.monitors.steptime.model.step_times import PREFIX, Floats, PhaseTimes
from backlight.records import Evidence, Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

SHARED = frozenset({Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER})
"""Phases in which collectives may wait for other ranks: their time is not only a rank's own work."""


@dataclass(frozen=True)
class StragglerLimits(SteadyLimits):
    """Limits of the rule ``straggler``."""

    straggler_share: float = limit(
        0.1, "share of a step that a rank works longer than the median of the ranks", high=1.0
    )


@rule("straggler", monitor="steptime", limits=StragglerLimits)
def straggler(run: Run, limits: StragglerLimits) -> Iterator[Finding]:
    """Find a rank whose own phases last longer, while it waits less than the others in the shared ones.

    Ranks that step together take equally long for a step; the phases show which of them is late.
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
    # Both must hold: it works longer, and in the shared phases the others wait for it.
    if excess <= limits.straggler_share or waited < excess / 2:
        return
    table, reference = tables[late], tables[others[0]]
    name = max(
        (n for n in table.names if n not in SHARED),
        key=lambda n: float(np.median(table.phase(n)) - np.median(reference.phase(n))),
    )
    phase = name.replace("_", " ")
    yield Finding(
        severity=Severity.WARNING,
        title=f"Rank {late} is a straggler: {percent(excess)} of a step slower, in {phase}",
        detail=(
            f"Rank {late} works {percent(excess)} of a step longer than the other ranks, mostly in {phase}, "
            f"and they wait for it. Expected gain: at most {percent(excess)} of a step."
        ),
        subject=Subject(rank=late, phase=name),
        evidence=tuple(
            Evidence(
                f"scalars/{PREFIX}{name}", None, float(np.median(t.phase(name))), f"s, median of rank {rank}"
            )
            for rank, t in ((late, table), (others[0], reference))
        ),
        fix=(
            "Check that rank: its share of the data, its machine (clock, temperature, other jobs), its "
            "loader. `backlight trace` on all ranks shows which collectives wait."
        ),
        refuted_if="another rank is late after ranks swap machines, or with equal batches.",
    )


def _own(table: PhaseTimes) -> Floats:
    kept = [column for column, name in enumerate(table.names) if name not in SHARED]
    return np.asarray(table.seconds[:, kept].sum(axis=1))
