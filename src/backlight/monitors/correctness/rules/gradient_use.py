"""Rules on the use of gradients: once, not cleared before, and clipped when they are there."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import (
    Fact,
    Names,
    facts_of,
    finding_on,
    observed,
    steps_of,
)
from backlight.records import Finding, Layout, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


@dataclass(frozen=True)
class GradientsNotClearedLimits(Limits, monitor="correctness"):
    """Limits of the rule ``gradients_not_cleared``."""

    not_cleared_steps: int = limit(
        2, "steps at which the sum was used: once may be a loop that starts", low=1
    )


@rule("gradients_not_cleared", monitor="correctness", limits=GradientsNotClearedLimits)
def gradients_not_cleared(run: Run, limits: GradientsNotClearedLimits) -> Iterator[Finding]:
    """Find gradients that an optimizer used, and used again together with those of the next backward."""
    for kind in (SecondStep, SecondBackward, SummedGradients, LeftByOther, LeftByEvaluation):
        facts = facts_of(run, kind)
        if len(steps_of(facts)) >= limits.not_cleared_steps:
            yield finding_on(facts)


class SecondStep(Fact, rule="gradients_not_cleared", kind="second_step"):
    """An optimizer took another step with the values that its last step had used."""

    optimizer: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.optimizer} takes two steps with the same gradients",
            f"At {observed(facts)} {self.optimizer} began another step without a backward since its last "
            "one. The gradients had the same values: the second step belongs to weights that no longer "
            "exist.",
            evidence=(self.optimizer, "optimizer"),
            fix="Call `optimizer.step()` once per backward, or `optimizer.zero_grad()` after it.",
            refuted_if="the second step is meant, as a line search may.",
        )


class SecondBackward(Fact, rule="gradients_not_cleared", kind="second_backward"):
    """A loss was propagated back again, onto the gradients of the first time."""

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            "The same loss is propagated back twice per step",
            f"At {observed(facts)} backward began a second time at the same tensor, while the gradients of "
            "the first time were still there: they count twice.",
            evidence=(2, "backward passes"),
            fix="Call `loss.backward()` once. `retain_graph=True` is often a sign of a second call.",
            refuted_if="the gradients of the first backward are read and cleared before the second one.",
        )


class LeftByOther(Fact, rule="gradients_not_cleared", kind="other"):
    """An optimizer used gradients that the loss of another one had left on its way through a module."""

    names: Names
    optimizer: str
    other: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            f"{self.names} {self.names.verb('keeps', 'keep')} the gradients of another optimizer's loss",
            f"At {observed(facts)} {self.optimizer} used gradients of {self.names} that a backward had left "
            f"before the step of {self.other}, for which it ran through this module. The next backward added "
            "to them: a discriminator then also learns what the loss of its generator asks for.",
            parameter=self.names.first[0],
            evidence=(self.names.count, "parameters"),
            fix=(
                "Call `zero_grad()` of this optimizer behind the step of the other one, or freeze its "
                "parameters while the other loss is computed."
            ),
            refuted_if="both losses are meant to train these parameters.",
        )


class LeftByEvaluation(Fact, rule="gradients_not_cleared", kind="evaluation"):
    """A backward in training mode added to gradients of ``count`` backward passes in evaluation mode."""

    model: str
    names: Names
    count: int
    line: str

    def _finding(self, facts: Sequence[Self]) -> Finding:
        passes = count(self.count, "backward pass", "backward passes")
        return self.finding(
            "The gradients of an evaluation are used in training",
            f"Before step {self.step} {passes} of {self.model} in evaluation mode left gradients in "
            f"{self.names}{phrases.at_line(self.line)}, to which the first backward in training mode added. "
            f"So it was at {count(len(steps_of(facts)), 'step')}: they follow the data of the evaluation.",
            module=self.model,
            line=self.line,
            severity=Severity.ERROR,
            evidence=(self.count, "backward passes"),
            fix="Evaluate under `torch.no_grad()`, without `backward`.",
            refuted_if="the gradients are None or zero when training goes on.",
        )


class SummedGradients(Fact, rule="gradients_not_cleared"):
    """An optimizer used the sum of gradients of two steps in ``count`` of the ``followed`` parameters."""

    names: Names
    followed: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        names, amount, is_every = self.names, self.names.count, self.names.count == self.followed
        return self.finding(
            (
                "Gradients are not cleared between optimizer steps"
                if is_every
                else f"The {names.verb('gradient', 'gradients')} of {names} "
                f"{names.verb('is', 'are')} not cleared"
            ),
            f"At {observed(facts)} the optimizer used gradients that still contained those of the step "
            f"before, in {names}: {phrases.share(amount, self.followed, 'followed parameters')}. Each "
            "step then follows the sum of all gradients so far.",
            parameter="" if is_every else names.first[0],
            severity=Severity.ERROR,
            evidence=(amount, "parameters"),
            fix="Call `optimizer.zero_grad()` once per optimizer step, before backward, for every optimizer.",
            refuted_if="the gradients before backward are None or zero at these steps.",
        )


@dataclass(frozen=True)
class GradientsDiscardedLimits(Limits, monitor="correctness"):
    """Limits of the rule ``gradients_discarded``."""

    discarded_steps: int = limit(
        3, "steps at which it happened: a script may drop the gradients of a bad batch", low=1
    )


@rule("gradients_discarded", monitor="correctness", limits=GradientsDiscardedLimits)
def gradients_discarded(run: Run, limits: GradientsDiscardedLimits) -> Iterator[Finding]:
    """Find backward passes whose gradients were cleared before any optimizer used them."""
    for kind in (ClearedBeforeStep, DiscardedBackwards):
        facts = facts_of(run, kind)
        if len(steps_of(facts)) >= limits.discarded_steps:
            yield finding_on(facts)
            return  # one cause


class ClearedBeforeStep(Fact, rule="gradients_discarded", kind="step"):
    """All gradients of the step were cleared when its optimizer began."""

    names: Names

    def _finding(self, facts: Sequence[Self]) -> Finding:
        return self.finding(
            "Gradients are cleared between backward and the optimizer step",
            f"At {observed(facts)} backward gave gradients, and those of {self.names} were None or zero when "
            "the optimizer began its step. Nothing is learned from them.",
            severity=Severity.ERROR,
            evidence=(self.names.count, "parameters"),
            fix="Move `optimizer.zero_grad()` before `loss.backward()`, or behind `optimizer.step()`.",
            refuted_if="the gradients are not zero directly before `optimizer.step()`.",
        )


class DiscardedBackwards(Fact, rule="gradients_discarded", kind="backward"):
    """Gradients of so many backward passes of a step were cleared; ``lines`` call backward, 0 if unknown."""

    discarded: int
    backwards: int
    lines: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        """Report the most common count; backward passes of several lines may serve several purposes."""
        counted = Counter((fact.discarded, fact.backwards) for fact in facts)
        (discarded, backwards), _ = counted.most_common(1)[0]
        same = [fact for fact in facts if (fact.discarded, fact.backwards) == (discarded, backwards)]
        used = backwards - discarded
        return same[0].finding(
            f"{discarded} of {backwards} backward passes per step are discarded",
            f"At {observed(same)} the gradients of {discarded} of {backwards} backward passes were cleared "
            f"before any optimizer used them. The step learned from {'the last' if used == 1 else used} "
            f"{'one' if used == 1 else 'of them'} only.",
            severity=Severity.ERROR if all(fact.lines == 1 for fact in same) else Severity.WARNING,
            evidence=(discarded, "backward passes"),
            fix=(
                "To accumulate, call `optimizer.zero_grad()` once per step: before its first backward, or "
                "right after `optimizer.step()`."
            ),
            refuted_if="the script itself uses these gradients before it clears them.",
        )


@dataclass(frozen=True)
class ClippingLimits(Limits, monitor="correctness"):
    """Limits of the rule ``clipping``."""

    early_clips: int = limit(3, "steps at which it happened: a loop may clip once before it starts", low=1)
    empty_clips: int = limit(2, "steps at which nothing was clipped", low=1)
    shard_clips: int = limit(3, "steps at which each rank clips by the norm of its own shard", low=1)


class EmptyClip(Fact, rule="clipping", kind="empty"):
    """Clipping was given ``count`` parameters, none of which has a gradient, and others have one."""

    line: str
    count: int

    def _finding(self, facts: Sequence[Self]) -> Finding:
        where = f" at {self.line}" if self.line else ""
        what = f"{self.count} parameters, none of which has a gradient" if self.count else "no parameter"
        return self.finding(
            "Clipping is given nothing to clip",
            f"At {observed(facts)} the clipping{where} was given {what}, while the parameters of the "
            "optimizer have gradients. The optimizer used gradients that were not clipped.",
            severity=Severity.ERROR,
            line=self.line,
            evidence=(self.count, "parameters"),
            fix=(
                "Give it the parameters that are trained, as a list: an iterator, such as `filter(...)` or "
                "`model.parameters()` in a variable, is empty once the optimizer has read it."
            ),
            refuted_if="a parameter that is clipped at that line has a gradient.",
        )


class EarlyClip(Fact, rule="clipping", kind="early"):
    """A clipping came before the gradients of its step."""

    line: str


@rule("clipping", monitor="correctness", limits=ClippingLimits)
def clipping(run: Run, limits: ClippingLimits) -> Iterator[Finding]:
    """Find clipping of nothing, of a shard by itself, and before the gradients that it is to clip."""
    yield from _by_shard(run, limits)
    empty = facts_of(run, EmptyClip)
    if len(steps_of(empty)) >= limits.empty_clips:
        yield finding_on(empty)
        return
    facts = facts_of(run, EarlyClip)
    if len(steps_of(facts)) < limits.early_clips:
        return
    line = facts[0].line
    where = f" at {line}" if line else ""
    yield facts[0].finding(
        "Gradients are clipped before backward, which changes nothing",
        f"At {observed(facts)} the clipping{where} came before the backward pass of its step, and none "
        "after it: there were no gradients yet, or those that the last step had used. The optimizer used "
        "gradients that were not clipped.",
        line=line,
        evidence=(line, "line"),
        fix="Move the clipping between `loss.backward()` and `optimizer.step()`.",
        refuted_if="a parameter has a gradient at that line that no step has used.",
    )


SAME_NORM = 0.01
"""Relative difference of two norms that are the same: one is rounded, or has a small number added."""


def _by_shard(run: Run, limits: ClippingLimits) -> Iterator[Finding]:
    """Find ranks that hold parts of the same parameters, and each clip by the norm of their part."""
    layouts = {p.placement.layout if p.placement else Layout.WHOLE for p in run.parameters() if p.numel}
    ranks = run.attempts[-1].ranks if run.attempts else ()
    if layouts != {Layout.SHARD} or len(ranks) < 2:
        return
    used = [run.scalar("clip/norm", rank=rank) for rank in ranks]
    of_part = [run.scalar("total_norm", rank=rank) for rank in ranks]
    steps = functools.reduce(np.intersect1d, [scalar.steps for scalar in (*used, *of_part)])
    used_RS, part_RS = (
        np.array([s.values[np.searchsorted(s.steps, steps)] for s in scalars]) for scalars in (used, of_part)
    )
    is_part_S = (np.abs(used_RS - part_RS) <= SAME_NORM * part_RS).all(axis=0)
    differs_S = used_RS.max(axis=0, initial=0.0) > (1 + SAME_NORM) * used_RS.min(axis=0, initial=np.inf)
    (rows,) = np.nonzero(is_part_S & differs_S)
    if len(rows) < limits.shard_clips:
        return
    row = int(rows[0])
    low, high = int(used_RS[:, row].argmin()), int(used_RS[:, row].argmax())
    step = int(steps[row])
    norms = [float(used_RS[rank, row]) for rank in (low, high)]
    yield Finding(
        severity=Severity.ERROR,
        title="Each rank clips its shard by the norm of its shard",
        detail=(
            f"The ranks hold parts of the same parameters. At {len(rows)} of {len(steps)} recorded steps the "
            f"norm that the clipping uses is that of the rank's own part: at step {step} "
            f"{phrases.number(norms[0])} on rank {ranks[low]} and {phrases.number(norms[1])} on rank "
            f"{ranks[high]}. The parts are scaled by different factors: the update has another direction."
        ),
        subject=Subject(step=step, rank=ranks[high]),
        evidence=tuple(phrases.scalar("clip/norm", step, norm, "gradient") for norm in norms),
        fix="Call `model.clip_grad_norm_(limit)` of FSDP, which adds the norms of all ranks, or use FSDP2.",
        refuted_if="the norms that the clipping uses are equal on all ranks.",
    )
