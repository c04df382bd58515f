"""Rule ``geometry_gaps``: measurements of the gradients' geometry that were asked for and dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from backlight.monitors.grokking.model.thresholds import Thresholds
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run

_NUMBER = re.compile(r"'[^']*'|\d+(?:\.\d+)?(?:e[-+]?\d+)?")

OBJECTS = ("gram", "agop", "window", "sketch", "product", "gradient", "mean_gradient")
"""First segments of what this monitor measures."""


@rule("geometry_gaps", monitor="grokking", thresholds=("unmeasured_gates",))
def geometry_gaps(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """State what was dropped, once for each object and kind of reason; what failed at a step is a warning."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in run.events("unmeasured"):
        what = str(event.payload.get("what") or "")
        if what.split("/", maxsplit=1)[0] in OBJECTS and not event.payload.get("parameters"):
            groups.setdefault((what, _kind(_reason(event))), []).append(event)
    for (what, _), events in groups.items():
        reason = _reason(events[0])
        gate = "coverage" in reason.casefold()
        # That a model can be called with its input alone, as the AGOP needs, is a guess, and no failure.
        failed = gate or (events[0].step is not None and what != "agop")
        if gate and len(events) < limits.unmeasured_gates:
            continue
        first = events[0].step
        times = f" {len(events)} times" if len(events) > 1 else ""
        since = f", first at step {first}" if first is not None else ""
        yield Finding(
            rule="geometry_gaps",
            severity=Severity.WARNING if failed else Severity.INFO,
            claim=f"{what} was not measured{times}{since}: {reason.rstrip('.')}.",
            subject=Subject(step=first, module=what),
            evidence=(Evidence("events/unmeasured", first, what),),
            next_check=(
                "Call backlight.gram(model, loss_fn, batch) on the same model: it raises where a watched "
                "training only warns, and names the parameter."
                if failed
                else "Look at the configuration of the run: was it to be measured?"
            ),
            refuted_if="the run holds this measurement at the steps in question.",
        )


def _reason(event: Event) -> str:
    return str(event.payload.get("reason") or "no reason was noted")


def _kind(reason: str) -> str:
    """Return a reason without its numbers, which differ from step to step; what is quoted is a name."""
    return _NUMBER.sub(lambda found: found[0] if found[0].startswith("'") else "#", reason)
