"""A rule: says so where nearly every gradient entry changes its sign at nearly every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

WINDOW = 20
"""Steps at the end of the run that are looked at."""

SHARE = 0.8
"""Share of entries from which on they count as going to and fro; chance gives 0.5."""


@rule("oscillating", monitor="oscillation")
def oscillating(run: Run, thresholds: Any) -> Iterator[Finding]:
    """Find gradients that point the other way at each step."""
    flipped = run.scalar("oscillation/flipped")
    last = flipped.values[-WINDOW:]
    if len(last) < WINDOW or (np.diff(flipped.steps[-WINDOW:]) > 1).any():
        return  # steps in between were not recorded: nothing is known of their signs
    median = float(np.median(last))
    if not median >= SHARE:
        return
    step = int(flipped.steps[-1])
    yield Finding(
        severity=Severity.WARNING,
        title="The gradient changes its sign from step to step",
        detail=f"{100 * median:.0f} % of all gradient entries changed their sign in the last {WINDOW} steps.",
        subject=Subject(step=step),
        evidence=(Evidence("scalars/oscillation/flipped", step, median),),
        fix="Train with half of the learning rate.",
        refuted_if="the share stays with a tenth of the learning rate.",
    )
