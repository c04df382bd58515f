"""Rule ``ranks_out_of_step``: a rank has taken fewer or more optimizer steps than the others."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.findings import phrases
from backlight.monitors.health.model.rank_divergence import RankLimits, out_of_step
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule(
    "ranks_out_of_step",
    monitor="health",
    limits=RankLimits,
)
def ranks_out_of_step(run: Run, limits: RankLimits) -> Iterator[Finding]:
    """Find ranks that have seen another number of backward passes at the same count of optimizer steps."""
    found = out_of_step(run)
    if found is None or found.steps < limits.apart_steps:
        return
    one = len(found.ranks) == 1
    who = f"{'Rank' if one else 'Ranks'} {', '.join(map(str, found.ranks[:8]))}"
    counts = ", ".join(str(found.seen[rank]) for rank in found.ranks[:8])
    others = [rank for rank in found.seen if rank not in found.ranks]
    yield Finding(
        severity=Severity.ERROR,
        title=f"{who} {'is' if one else 'are'} out of step with the others from step {found.step} on",
        detail=(
            f"{who} had run {counts} backward passes at the end of step {found.step}, the others "
            f"{found.common}: {'it' if one else 'they'} skipped or added an optimizer step, or accumulated "
            f"differently. In the {phrases.plural(found.steps, 'recorded step')} since, equal step numbers "
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
