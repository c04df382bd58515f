"""Rule ``same_order_every_epoch``: batches that a loader was to shuffle, or one batch at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.contradictions import contradictions, evidence_of, steps_of
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

SHUFFLING = frozenset({"RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler"})
"""Samplers whose order is to differ from epoch to epoch."""


@dataclass(frozen=True)
class SameOrderLimits(Limits, monitor="correctness"):
    """Limits of the rule ``same_order_every_epoch``."""

    order_batches: int = limit(
        4,
        "batches, over all epochs that repeat the one before, that must be equal: few may be chance",
        low=2,
    )


@rule("same_order_every_epoch", monitor="correctness", limits=SameOrderLimits)
def same_order_every_epoch(run: Run, limits: SameOrderLimits) -> Iterator[Finding]:
    """Find loaders whose epochs begin with equal batches, and loops that only take the first batch."""
    found = contradictions(run, "same_order_every_epoch")
    single = [event for event in found if event.payload["kind"] == "batch"]
    if single:
        yield Finding(
            severity=Severity.WARNING,
            title="Every step trains on the first batch of the loader",
            detail=(
                f"The loader was started anew {single[0].payload['epochs']} times, and each time gave the "
                "same batch, of which it has more than one."
            ),
            subject=Subject(step=single[0].step),
            evidence=(evidence_of(single, single[0].payload["sampler"], "sampler"),),
            fix="Iterate over the loader, `for batch in loader`, instead of calling `next(iter(loader))`.",
            refuted_if="only one batch is to be learned, as in a test of the model.",
        )
    for sampler in dict.fromkeys(event.payload["sampler"] for event in found if event not in single):
        equal = [event for event in found if event.payload["sampler"] == sampler and event not in single]
        longest: dict[int, int] = {}
        for event in equal:
            epoch = int(event.payload["epochs"])
            longest[epoch] = max(longest.get(epoch, 0), int(event.payload["batches"]))
        if sum(longest.values()) >= limits.order_batches and sampler in SHUFFLING:
            yield Finding(
                severity=Severity.WARNING,
                title="The batches of every epoch come in the same order",
                detail=(
                    f"The first {max(longest.values())} batches of epoch {max(longest)} are those of the "
                    f"epoch before, although their order comes from a {sampler}."
                ),
                subject=Subject(step=steps_of(equal)[0]),
                evidence=(evidence_of(equal, sampler, "sampler"),),
                fix=(
                    "Call `sampler.set_epoch(epoch)` before each epoch."
                    if sampler == "DistributedSampler"
                    else "Seed the random numbers once, before the first epoch, not in the loop."
                ),
                refuted_if="the indices of two epochs differ.",
            )
