"""Rule ``logits_materialised``: whole logits and their fp32 copy are a large part of the peak memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import peak_memory, percent, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import size


@dataclass(frozen=True)
class LogitsMaterialisedLimits(Limits, monitor="steptime"):
    """Limits of the rule ``logits_materialised``."""

    logits_share: float = limit(0.2, "share of the peak memory that logits and their copies take", high=1.0)
    logits_bytes: float = limit(2.0**26, "bytes below which rewriting a loss is not worth it (64 MiB)")


@rule("logits_materialised", monitor="steptime", limits=LogitsMaterialisedLimits)
def logits_materialised(run: Run, limits: LogitsMaterialisedLimits) -> Iterator[Finding]:
    """Find logits that take memory: elements times (bytes of their type + 4 of the fp32 copy).

    The peak is that of the device, or of the process where there is none.
    """
    profile = read_profile(run)
    logits = profile.content.get("logits") if profile is not None else None
    if profile is None or not logits or profile.state("chunked loss") == "on":
        return
    shape = [int(length) for length in logits["shape"]]
    taken = math.prod(shape) * (int(logits["itemsize"]) + 4)
    peak, _ = peak_memory(run, profile)
    if taken < limits.logits_bytes or peak <= 0 or taken / peak <= limits.logits_share:
        return
    share = min(1.0, taken / peak)
    yield Finding(
        severity=Severity.WARNING,
        title=f"Logits take {percent(share)} of the peak memory",
        detail=(
            f"Logits of shape {' x '.join(map(str, shape))} in {logits['dtype']} and their fp32 copy take "
            f"{size(taken)}, {percent(share)} of the peak of {size(peak)}. Expected gain: up to "
            f"{size(taken)} of memory with a chunked loss."
        ),
        subject=Subject(),
        evidence=(
            profile.evidence("logits", taken, "bytes"),
            profile.evidence("memory/peak", peak, "bytes"),
        ),
        fix=(
            "Compute the loss over chunks of tokens, or with a fused linear cross entropy, so that the "
            "logits of all tokens never exist at once; `backlight memory` shows the live tensors before and "
            "after."
        ),
        refuted_if="the memory peak is elsewhere in the step and does not fall with a chunked loss.",
    )
