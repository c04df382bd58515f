"""Rule ``schedule``: steps of a learning rate schedule at the wrong time."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.findings import phrases
from backlight.findings.limits import Limits
from backlight.monitors.correctness.model.contradictions import contradictions, evidence_of
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run


@rule("schedule", monitor="correctness")
def schedule(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find schedules that take a step before the optimizer, or with every batch where epochs were meant."""
    seen = set()
    for event in contradictions(run, "schedule"):
        about = event.payload["kind"], event.payload["schedule"]
        if about not in seen:
            seen.add(about)
            yield _before_optimizer(event) if about[0] == "before_optimizer" else _per_batch(event)


def _before_optimizer(event: Event) -> Finding:
    name = event.payload["schedule"]
    return Finding(
        severity=Severity.INFO,
        title=f"{name} takes its first step before the optimizer",
        detail=(
            f"`{name}.step()` was called before the first `optimizer.step()`: the first value of the "
            "schedule is never used, and every other one comes a step early."
        ),
        subject=Subject(step=event.step),
        evidence=(evidence_of([event], name, "schedule"),),
        fix="Call `scheduler.step()` after `optimizer.step()`.",
        refuted_if="the first value is skipped on purpose, as a warm-up that begins at 0.",
    )


def _per_batch(event: Event) -> Finding:
    facts = event.payload
    name, steps, batches = facts["schedule"], int(facts["taken"]), int(facts["batches"])
    rate = phrases.number(float(facts["rate"]))
    happened = (
        f"it is past its minimum and rises again (now {rate})"
        if facts["is_past"]
        else f"the learning rate has fallen to {rate}, less than a thousandth of the first one"
    )
    return Finding(
        severity=Severity.WARNING,
        title=f"{name} runs out within the first epoch",
        detail=(
            f"`{name}.step()` is called with every step of the optimizer. After {steps} of them, in the "
            f"first epoch of {batches} batches, {happened}. Its settings count epochs, or are too small."
        ),
        subject=Subject(step=event.step),
        evidence=(evidence_of([event], steps, "steps of the schedule"),),
        fix="Call `scheduler.step()` once per epoch, or give the schedule its length in steps.",
        refuted_if="the learning rate is meant to go through its schedule several times per epoch.",
    )
