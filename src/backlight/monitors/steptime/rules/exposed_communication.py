"""Rule ``exposed_communication``: the device communicates and nothing else runs."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import percent, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("exposed_communication", monitor="steptime", thresholds=("exposed_share",))
def exposed_communication(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find communication that no computation hides."""
    profiled = read_profile(run)
    exposed = profiled.content.get("exposed_communication") if profiled is not None else None
    if profiled is None or exposed is None or float(exposed) <= limits.exposed_share:
        return
    yield Finding(
        severity=Severity.WARNING,
        title=f"Communication is exposed for {percent(float(exposed))} of a step",
        detail=(
            f"In {percent(float(exposed))} of a step the device communicates and computes nothing. "
            f"Expected gain: at most {percent(float(exposed))} of a step."
        ),
        subject=Subject(),
        evidence=(profiled.evidence("exposed_communication", float(exposed), "of a step"),),
        fix=(
            "Let reductions begin during backward (buckets of DDP, prefetch of FSDP), reduce every few steps "
            "with accumulation under no_sync(), or send fewer bits. First look for a rank that comes late: "
            "the others then wait, which is no communication (`backlight trace` on all ranks)."
        ),
        refuted_if="the collectives wait for a late rank, and take their usual time once it has come.",
    )
