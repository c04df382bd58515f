"""Rules on the use of gradients: once, not cleared before, and clipped when they are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.contradictions import (
    contradictions,
    evidence_of,
    observed,
    steps_of,
)
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run


@dataclass(frozen=True)
class GradientsNotClearedLimits(Limits, monitor="correctness"):
    """Limits of the rule ``gradients_not_cleared``."""

    not_cleared_steps: int = limit(
        2, "steps at which the sum was used: once may be a loop that starts", low=1
    )


@rule("gradients_not_cleared", monitor="correctness", limits=GradientsNotClearedLimits)
def gradients_not_cleared(run: Run, limits: GradientsNotClearedLimits) -> Iterator[Finding]:
    """Find gradients that an optimizer used, and used again together with those of the next backward."""
    events = contradictions(run, "gradients_not_cleared")
    for kind, of in _TWICE.items():
        same = [event for event in events if event.payload.get("kind") == kind]
        if len(steps_of(same)) >= limits.not_cleared_steps:
            yield of(same)
    found = [event for event in events if event.payload.get("kind") not in _TWICE]
    steps = steps_of(found)
    if len(steps) < limits.not_cleared_steps:
        return
    facts = found[0].payload
    names, count, followed = facts["parameters"], int(facts["count"]), int(facts["followed"])
    yield Finding(
        severity=Severity.ERROR,
        title=(
            "Gradients are not cleared between optimizer steps"
            if count == followed
            else f"The gradient{'s' if count > 1 else ''} of {phrases.parameters(names, count)} "
            f"{'are' if count > 1 else 'is'} not cleared"
        ),
        detail=(
            f"At {observed(steps)} the optimizer used gradients that still contained those of the step "
            f"before, in {phrases.parameters(names, count)}: "
            f"{phrases.share(count, followed, 'followed parameters')}. Each step then follows the sum of all "
            "gradients so far."
        ),
        subject=Subject(parameter=None if count == followed else names[0], step=steps[0]),
        evidence=(evidence_of(found, count, "parameters"),),
        fix="Call `optimizer.zero_grad()` once per optimizer step, before backward, for every optimizer.",
        refuted_if="the gradients before backward are None or zero at these steps.",
    )


def _second_step(found: Sequence[Event]) -> Finding:
    steps, optimizer = steps_of(found), found[0].payload["optimizer"]
    return Finding(
        severity=Severity.WARNING,
        title=f"{optimizer} takes two steps with the same gradients",
        detail=(
            f"At {observed(steps)} {optimizer} began another step without a backward since its last one. The "
            "gradients had the same values: the second step belongs to weights that no longer exist."
        ),
        subject=Subject(step=steps[0]),
        evidence=(evidence_of(found, optimizer, "optimizer"),),
        fix="Call `optimizer.step()` once per backward, or `optimizer.zero_grad()` after it.",
        refuted_if="the second step is meant, as a line search may.",
    )


def _second_backward(found: Sequence[Event]) -> Finding:
    steps = steps_of(found)
    return Finding(
        severity=Severity.WARNING,
        title="The same loss is propagated back twice per step",
        detail=(
            f"At {observed(steps)} backward began a second time at the same tensor, while the gradients of "
            "the first time were still there: they count twice."
        ),
        subject=Subject(step=steps[0]),
        evidence=(evidence_of(found, 2, "backward passes"),),
        fix="Call `loss.backward()` once. `retain_graph=True` is often a sign of a second call.",
        refuted_if="the gradients of the first backward are read and cleared before the second one.",
    )


_TWICE = {"second_step": _second_step, "second_backward": _second_backward}
"""Gradients that are used twice in one step, by kind."""


@dataclass(frozen=True)
class GradientsDiscardedLimits(Limits, monitor="correctness"):
    """Limits of the rule ``gradients_discarded``."""

    discarded_steps: int = limit(
        3, "steps at which it happened: a script may drop the gradients of a bad batch", low=1
    )


@rule("gradients_discarded", monitor="correctness", limits=GradientsDiscardedLimits)
def gradients_discarded(run: Run, limits: GradientsDiscardedLimits) -> Iterator[Finding]:
    """Find backward passes whose gradients were cleared before any optimizer used them."""
    found = contradictions(run, "gradients_discarded")
    for moment in ("step", "backward"):
        of_moment = [event for event in found if event.payload["moment"] == moment]
        if len(steps_of(of_moment)) >= limits.discarded_steps:
            yield _before_step(of_moment) if moment == "step" else _between(of_moment)
            return  # one cause


def _before_step(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    count = int(facts["count"])
    return Finding(
        severity=Severity.ERROR,
        title="Gradients are cleared between backward and the optimizer step",
        detail=(
            f"At {observed(steps)} backward gave gradients, and those of "
            f"{phrases.parameters(facts['parameters'], count)} were None or zero when the optimizer began "
            "its step. Nothing is learned from them."
        ),
        subject=Subject(step=steps[0]),
        evidence=(evidence_of(found, count, "parameters"),),
        fix="Move `optimizer.zero_grad()` before `loss.backward()`, or behind `optimizer.step()`.",
        refuted_if="the gradients are not zero directly before `optimizer.step()`.",
    )


def _between(found: Sequence[Event]) -> Finding:
    """Report the most common count; backward passes of several lines may serve several purposes."""
    counted = [(int(e.payload.get("discarded", 0)), int(e.payload["backwards"])) for e in found]
    (discarded, backwards), _ = Counter(counted).most_common(1)[0]
    same = [e for e, counts in zip(found, counted, strict=True) if counts == (discarded, backwards)]
    steps, used = steps_of(same), backwards - discarded
    is_accumulation = all(event.payload.get("lines") == 1 for event in same)
    return Finding(
        severity=Severity.ERROR if is_accumulation else Severity.WARNING,
        title=f"{discarded} of {backwards} backward passes per step are discarded",
        detail=(
            f"At {observed(steps)} the gradients of {discarded} of {backwards} backward passes were cleared "
            f"before any optimizer used them. The step learned from {'the last' if used == 1 else used} "
            f"{'one' if used == 1 else 'of them'} only."
        ),
        subject=Subject(step=steps[0]),
        evidence=(evidence_of(same, discarded, "backward passes"),),
        fix=(
            "To accumulate, call `optimizer.zero_grad()` once per step: before its first backward, or right "
            "after `optimizer.step()`."
        ),
        refuted_if="the script itself uses these gradients before it clears them.",
    )


@dataclass(frozen=True)
class ClippingOrderLimits(Limits, monitor="correctness"):
    """Limits of the rule ``clipping_order``."""

    early_clips: int = limit(3, "steps at which it happened: a loop may clip once before it starts", low=1)


@rule("clipping_order", monitor="correctness", limits=ClippingOrderLimits)
def clipping_order(run: Run, limits: ClippingOrderLimits) -> Iterator[Finding]:
    """Find clipping that comes before the gradients that it is to clip."""
    found = contradictions(run, "clipping_order")
    steps = steps_of(found)
    if len(steps) < limits.early_clips:
        return
    line = str(found[0].payload["line"])
    where = f" at {line}" if line else ""
    yield Finding(
        severity=Severity.WARNING,
        title="Gradients are clipped before backward, which changes nothing",
        detail=(
            f"At {observed(steps)} the clipping{where} came before the backward pass of its step, and none "
            "after it: there were no gradients yet, or those that the last step had used. The optimizer used "
            "gradients that were not clipped."
        ),
        subject=Subject(step=steps[0], line=line or None),
        evidence=(evidence_of(found, line, "line"),),
        fix="Move the clipping between `loss.backward()` and `optimizer.step()`.",
        refuted_if="a parameter has a gradient at that line that no step has used.",
    )
