"""Rule ``recomputation_differs``: a gradient that belongs to another dropout mask than the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import Fact, facts_of, observed, steps_of
from backlight.records import Finding, Severity
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class RecomputationLimits(Limits, monitor="correctness"):
    """Limits of the rule ``recomputation_differs``."""

    recomputed_steps: int = limit(2, "observed steps at which a region draws random numbers", low=1)


class OtherRandomNumbers(Fact, rule="recomputation_differs"):
    """A checkpointed region at ``line`` draws random numbers that its recomputation cannot draw again."""

    line: str


@rule("recomputation_differs", monitor="correctness", limits=RecomputationLimits)
def recomputation_differs(run: Run, limits: RecomputationLimits) -> Iterator[Finding]:
    """Find checkpointed regions that draw random numbers without preserving the random state."""
    facts = facts_of(run, OtherRandomNumbers)
    if len(steps_of(facts)) < limits.recomputed_steps:
        return
    line = facts[0].line
    where = f", called at {line}," if line else ""
    yield facts[0].finding(
        "Checkpointed regions are recomputed with other random numbers",
        f"At {observed(facts)} a region with `preserve_rng_state=False`{where} drew random numbers in its "
        "forward. Its recomputation draws others: the gradient belongs to another dropout mask than the "
        "loss.",
        line=line,
        severity=Severity.ERROR,
        evidence=(line, "line"),
        fix="Leave `preserve_rng_state` of `torch.utils.checkpoint.checkpoint` at True.",
        refuted_if="the region seeds its random numbers itself, and so draws the same ones again.",
    )
