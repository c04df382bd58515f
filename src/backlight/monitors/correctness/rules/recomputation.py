"""Rule ``recomputation_differs``: a gradient that belongs to another computation than the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import Fact, facts_by_kind, finding_on, observed, steps_of
from backlight.records import Finding, Severity
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class RecomputationLimits(Limits, monitor="correctness"):
    """Limits of the rule ``recomputation_differs``."""

    recomputed_steps: int = limit(
        2, "observed steps at which a region draws random numbers, or computes other values", low=1
    )


class OtherRandomNumbers(Fact, rule="recomputation_differs"):
    """A checkpointed region at ``line`` draws random numbers that its recomputation cannot draw again."""

    line: str

    def _finding(self, facts: Sequence[OtherRandomNumbers]) -> Finding:
        where = f", called at {self.line}," if self.line else ""
        return self.finding(
            "Checkpointed regions are recomputed with other random numbers",
            f"At {observed(facts)} a region with `preserve_rng_state=False`{where} drew random numbers in "
            "its forward. Its recomputation draws others: the gradient belongs to another dropout mask than "
            "the loss.",
            line=self.line,
            severity=Severity.ERROR,
            evidence=(self.line, "line"),
            fix="Leave `preserve_rng_state` of `torch.utils.checkpoint.checkpoint` at True.",
            refuted_if="the region seeds its random numbers itself, and so draws the same ones again.",
        )


class OtherModules(Fact, rule="recomputation_differs", kind="modules"):
    """``regions`` regions of a backward at ``line`` ran other modules again than in forward.

    ``departure`` describes the first.
    """

    line: str
    departure: str
    regions: int

    def _finding(self, facts: Sequence[OtherModules]) -> Finding:
        where = f" at {self.line}" if self.line else ""
        more = f", and so did {self.regions - 1} more of that backward" if self.regions > 1 else ""
        return self.finding(
            "Checkpointed regions recompute other modules than their forward ran",
            f"At {observed(facts)} {self.departure}{where}{more}. The function of the region reads a "
            "variable that has changed by the time of the backward: these gradients are wrong.",
            line=self.line,
            severity=Severity.ERROR,
            evidence=(self.departure, "regions"),
            fix="Pass the module itself, `checkpoint(block, x)`, or bind it where the function is made: "
            "`lambda x, block=block: block(x)`.",
            refuted_if="both names belong to one module.",
        )


class OtherValues(Fact, rule="recomputation_differs", kind="values"):
    """The recomputation of region ``number`` at ``line`` computes other values; ``causes`` changed before."""

    line: str
    number: int
    causes: tuple[str, ...]

    def _finding(self, facts: Sequence[OtherValues]) -> Finding:
        where = f" at {self.line}" if self.line else ""
        # The last region of a forward is the first of its backward.
        number, causes = min(
            (f.number, f.causes) for f in facts if f.step == self.step and f.line == self.line
        )
        why = f" In between, {'; '.join(causes)}." if causes else ""
        return self.finding(
            "The recomputation of a checkpointed region computes other values",
            f"At {observed(facts)} region {number}{where} recomputed values that differ from those of "
            f"its forward by more than rounding.{why} The gradient belongs to another computation than the "
            "loss.",
            line=self.line,
            severity=Severity.ERROR,
            evidence=(self.line, "line"),
            fix="Let the region depend on its arguments and parameters alone: pass what changes as an "
            "argument, and count calls outside of it.",
            refuted_if="`backlight check --recompute` reports no difference.",
        )


@rule("recomputation_differs", monitor="correctness", limits=RecomputationLimits)
def recomputation_differs(run: Run, limits: RecomputationLimits) -> Iterator[Finding]:
    """Find checkpointed regions whose recomputation is not that of their forward."""
    groups = {type(facts[0]): facts for facts in facts_by_kind(run, "recomputation_differs")}
    if modules := groups.get(OtherModules):
        yield finding_on(modules)
    for kind in (OtherRandomNumbers, OtherValues):  # other random numbers give other values
        if len(steps_of(groups.get(kind, ()))) >= limits.recomputed_steps:
            yield finding_on(groups[kind])
            return
