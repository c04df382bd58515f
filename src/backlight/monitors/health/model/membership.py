"""Parameters that only the model or only the optimizer holds, as after a module was replaced. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.records import Evidence, ParameterRecord
from backlight.store.read.run import Run

# Capture names a tensor so that an optimizer holds and no module does.
_STALE_NAME = re.compile(r"optimizer\d+\.group\d+\.parameter\d+")


@dataclass(frozen=True)
class MembershipLimits(Limits, monitor="health"):
    """Limits that the rules ``no_gradient`` and ``no_update`` share."""

    no_gradient_steps: int = limit(
        5, "recorded steps before a parameter without any gradient is called unused", low=1
    )


def is_stale(record: ParameterRecord) -> bool:
    """Return whether an optimizer holds the parameter and no module does."""
    return _STALE_NAME.fullmatch(record.name) is not None


def stale_parameters(run: Run) -> list[ParameterRecord]:
    """Return the parameters that an optimizer holds, no module does, and no gradient reached."""
    frame = run.frame("gradient", "norm")
    measured_SP = frame.measured if frame.any_rank is None else frame.any_rank
    measured = {frame.names[i] for i in np.flatnonzero(measured_SP.any(axis=0))}
    return [p for p in run.parameters() if is_stale(p) and p.name not in measured and p.numel > 0]


def without_optimizer(run: Run, window: int) -> list[ParameterRecord]:
    """Return trainable parameters with ``window`` gradients that no watched optimizer holds.

    Empty where no optimizer holds any parameter: then none is watched.
    """
    records = run.parameters()
    outside = [p for p in records if not p.group and p.requires_grad]
    if not outside or not any(p.group for p in records):
        return []
    frame = run.frame("gradient", "norm")
    columns = [frame.names.index(p.name) for p in outside]
    counts = np.sum(frame.measured[:, columns] & (frame.values[:, columns] > 0), axis=0)
    return [p for p, count in zip(outside, counts, strict=True) if count >= window]


def stale_evidence(run: Run, stale: Sequence[ParameterRecord]) -> tuple[Evidence, ...]:
    """Return what proves that an optimizer holds stale parameters: no gradient, a group, the first step."""
    frame = run.frame("gradient", "norm")
    last = int(frame.steps[np.flatnonzero(frame.measured.any(axis=1))[-1]])
    order = phrases.loudest(stale, lambda p: p.numel)
    return (
        *(Evidence(f"series/gradient/measured/{p.name}", last, 0, "1") for p in order),
        *(Evidence(f"parameters/group/{p.name}", None, p.group or "none", "1") for p in order[:1]),
        *(e for p in order[:1] for e in first_missing(run, p.name)),
    )


def first_missing(run: Run, name: str) -> list[Evidence]:
    """Return the event that records when an optimizer first stepped without a gradient of ``name``."""
    for event in run.events("no_grad_at_step"):
        if name in (event.payload.get("parameters") or ()):
            return [Evidence("events/no_grad_at_step", event.step, name, "parameter")]
    return []
