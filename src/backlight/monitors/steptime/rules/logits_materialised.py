"""Rule ``logits_materialised``: whole logits and their fp32 copies are a large part of the peak of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import circumstances, percent, read_profile, size
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("logits_materialised", monitor="steptime", thresholds=("logits_share", "logits_bytes"))
def logits_materialised(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find logits that take memory: elements times (bytes of their type + 4 of the fp32 copy).

    The peak is that of the device, or of the process where there is none.
    """
    profiled = read_profile(run)
    logits = profiled.content.get("logits") if profiled is not None else None
    if profiled is None or not logits or profiled.state("chunked loss") == "on":
        return
    shape = [int(length) for length in logits["shape"]]
    taken = math.prod(shape) * (int(logits["itemsize"]) + 4)
    told = circumstances(run)
    memory = profiled.content.get("memory") or (told.payload.get("memory") if told is not None else None)
    peak = float((memory or {}).get("peak") or 0.0)
    if taken < limits.logits_bytes or peak <= 0 or taken / peak <= limits.logits_share:
        return
    share = min(1.0, taken / peak)
    yield Finding(
        severity=Severity.WARNING,
        title=f"Logits take {size(taken)}, {percent(share)} of the peak of memory",
        detail=(
            f"Logits of shape {' x '.join(map(str, shape))} in {logits['dtype']} with their fp32 copy take "
            f"{size(taken)}, {percent(share)} of the peak of {size(peak)}. Expected gain: up to "
            f"{size(taken)} of "
            "memory, which a loss over chunks does not hold."
        ),
        subject=Subject(),
        evidence=(
            profiled.evidence("logits", taken, "bytes"),
            profiled.evidence("memory/peak", peak, "bytes"),
        ),
        fix=(
            "Compute the loss over chunks of tokens, or with a fused linear cross entropy, so that the "
            "logits of "
            "all tokens never exist at once; `backlight memory` shows the step's live set before and after."
        ),
        refuted_if="the peak of memory lies elsewhere in the step and does not fall with chunks.",
    )
