"""Rule ``uneven_microbatches``: targets weigh more in small microbatches than in large ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import Fact, facts_of, observed, steps_of
from backlight.records import Finding
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class UnevenLimits(Limits, monitor="correctness"):
    """Limits of the rule ``uneven_microbatches``."""

    uneven_steps: int = limit(3, "observed steps with uneven microbatches", low=2)
    uneven_share: float = limit(
        0.5, "share of the observed steps; the last microbatch of an epoch may be smaller", high=1.0
    )
    uneven_ratio: float = limit(
        1.25, "median ratio of the largest weight of a target to the smallest in the same step", low=1.0
    )


class UnevenMicrobatches(Fact, rule="uneven_microbatches"):
    """Microbatches with these numbers of targets, whose weights have this ratio, after ``comparisons``."""

    targets: tuple[int, ...]
    ratio: float
    comparisons: int


class Classes(Fact, event="classes"):
    """How many classes the loss compares, and the factor of the root of backward to the mean over targets."""

    classes: int
    factor: float


@rule("uneven_microbatches", monitor="correctness", limits=UnevenLimits)
def uneven_microbatches(run: Run, limits: UnevenLimits) -> Iterator[Finding]:
    """Find accumulated means over different numbers of targets."""
    facts = facts_of(run, UnevenMicrobatches)
    steps = steps_of(facts)
    if len(steps) < limits.uneven_steps:
        return
    ratio = median(fact.ratio for fact in facts)
    is_rare = len(facts) < limits.uneven_share * max(fact.comparisons for fact in facts)
    if is_rare or ratio < limits.uneven_ratio:
        return
    counts = ", ".join(map(str, facts[0].targets[:4]))
    yield facts[0].finding(
        "Targets of short microbatches weigh more than those of long ones",
        f"At {observed(facts)} the microbatches of a step have different numbers of targets (step "
        f"{steps[0]}: {counts}), and each is averaged on its own. In the median, a target of one weighs "
        f"{phrases.number(ratio)} times as much as a target of another.",
        evidence=(round(facts[0].ratio, 3), "ratio of weights"),
        fix=(
            'Sum the loss of each microbatch, `cross_entropy(..., reduction="sum")`, and divide it by the '
            "targets of all microbatches of the step."
        ),
        refuted_if="every sequence is to weigh the same, whatever its length.",
    )
