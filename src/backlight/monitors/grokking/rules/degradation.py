"""Rule ``degradation``: the run stored less than it was asked to, by its own choice."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.grokking.model.thresholds import Thresholds
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("degradation", monitor="grokking")
def degradation(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """State each cheaper tier that the run took (full factors, top-k, Gram, scalars), and why."""
    for event in run.events("degradation"):
        told = event.payload
        before, after = str(told.get("from") or "what was asked for"), str(told.get("to") or "a cheaper tier")
        reason = str(told.get("reason") or "no reason was noted").rstrip(".")
        left = told.get("left_out") or ()
        names = ", ".join(str(name) for name in left) if isinstance(left, (list, tuple)) else str(left)
        yield Finding(
            rule="degradation",
            severity=Severity.WARNING,
            claim=(
                f"The run recorded {after} in place of {before}: {reason}."
                f"{f' Left out: {names}.' if names else ''}"
            ),
            subject=Subject(step=event.step),
            evidence=(Evidence("events/degradation", event.step, after),),
            next_check="backlight grok estimate says what each tier costs, and what is free.",
            refuted_if="the arrays that are said to be left out are in the run.",
        )
