"""Rule ``uneven_microbatches``: weights of targets that depend on how a batch is divided."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import Fact, facts_of, finding_on, observed, steps_of
from backlight.records import Finding, Severity
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
    uneven_ranks: float = limit(
        2.0, "the same between ranks, which differ by chance where sequences have different lengths", low=1.0
    )


UNEVEN = 1.01
"""Ratio of weights from which on they count as different; below lies rounding."""


class UnevenMicrobatches(Fact, rule="uneven_microbatches"):
    """Microbatches with these numbers of targets, whose weights have this ratio, after ``comparisons``."""

    targets: tuple[int, ...]
    ratio: float
    comparisons: int


class RankTargets(Fact, event="rank_targets"):
    """How many targets this rank has, and what one weighs; gradients of ``ranks`` are averaged."""

    targets: int
    weight: float
    ranks: tuple[int, ...]


class DividedTwice(Fact, rule="uneven_microbatches", kind="divided_twice"):
    """The loss of each of ``count`` microbatches was divided by their number more than once."""

    count: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        n = self.count
        return self.finding(
            f"The loss of each microbatch is divided by {n} twice",
            f"At {observed(facts)} a step has {n} microbatches, and the loss of each was divided by {n} and "
            f"then by {n} again: the gradient is {n} times smaller than that of the whole batch.",
            evidence=(n, "microbatches"),
            fix=(
                "Divide once: `accelerator.backward` and DeepSpeed's `engine.backward` divide by the number "
                "of microbatches themselves."
            ),
            refuted_if=f"one of the two divisions by {n} is meant as a factor of the loss.",
        )


class SumOfMeans(Fact, rule="uneven_microbatches", kind="sum_of_means"):
    """The gradient of a step is the sum of the means of so many microbatches, by the backward of one line."""

    count: int
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        n = max(fact.count for fact in facts)
        return self.finding(
            f"The losses of {n} microbatches are added up, and not divided by {n}",
            f"At {observed(facts)}, the gradients of {n} backward passes{phrases.at_line(self.line)} are "
            f"added, each of a mean over its microbatch: the gradient is {n} times that of the whole batch.",
            line=self.line,
            severity=Severity.INFO,
            evidence=(n, "losses"),
            fix=(f"Write `(loss / {n}).backward()`: rate and clipping then hold for any number of them."),
            refuted_if="the losses belong to several tasks, or the learning rate was chosen for their sum.",
        )


class Classes(Fact, event="classes"):
    """How many classes the loss compares, and the factor of the root of backward to the mean over targets."""

    classes: int
    factor: float


@rule("uneven_microbatches", monitor="correctness", limits=UnevenLimits)
def uneven_microbatches(run: Run, limits: UnevenLimits) -> Iterator[Finding]:
    """Find means over different numbers of targets that are added up, and losses that are divided twice."""
    if len(steps_of(divided := facts_of(run, DividedTwice))) >= limits.uneven_steps:
        yield finding_on(divided)
    yield from _between_ranks(facts_of(run, RankTargets), limits)
    if uneven := facts_of(run, UnevenMicrobatches):
        yield from _within_steps(uneven, limits)
    elif len(steps_of(sums := facts_of(run, SumOfMeans))) >= limits.uneven_steps:
        yield finding_on(sums)


def _within_steps(facts: Sequence[UnevenMicrobatches], limits: UnevenLimits) -> Iterator[Finding]:
    """Find means over different numbers of targets that are added up in one process."""
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


def _between_ranks(facts: Sequence[RankTargets], limits: UnevenLimits) -> Iterator[Finding]:
    """Find averages over ranks of means over different numbers of targets."""
    by_step: dict[tuple[int, int], list[RankTargets]] = defaultdict(list)
    for fact in facts:
        by_step[fact.attempt, fact.step].append(fact)
    compared = [
        group for group in by_step.values() if {fact.rank for fact in group} == set(group[0].ranks) != {0}
    ]
    ratios = [max(f.weight for f in group) / min(f.weight for f in group) for group in compared]
    uneven = [group for group, ratio in zip(compared, ratios, strict=True) if ratio > UNEVEN]
    if len(uneven) < limits.uneven_steps or len(uneven) < limits.uneven_share * len(compared):
        return
    if (ratio := median(ratios)) < limits.uneven_ranks:
        return
    first = sorted(uneven[0], key=lambda fact: fact.rank)
    counts = ", ".join(f"{fact.targets} on rank {fact.rank}" for fact in first[:4])
    yield first[0].finding(
        "Targets of ranks with few of them weigh more than those of others",
        f"At {observed([group[0] for group in uneven])} the ranks have different numbers of targets (step "
        f"{first[0].step}: {counts}). Each takes the mean over its own, and the gradients are averaged: "
        f"in the median, a target of one weighs {phrases.number(ratio)} times as much as one of another.",
        evidence=(round(ratio, 3), "ratio of weights"),
        fix=(
            "Sum the loss on each rank, divide it by the targets of all ranks (`all_reduce` of their number) "
            "and multiply it by the number of ranks, by which the average divides."
        ),
        refuted_if="every rank or sequence is to weigh the same, however many targets it has.",
    )
