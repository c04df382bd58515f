"""Rule ``exposed_communication``: the device communicates and computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import percent, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@dataclass(frozen=True)
class ExposedCommunicationLimits(Limits, monitor="steptime"):
    """Limits of the rule ``exposed_communication``."""

    exposed_share: float = limit(
        0.1, "share of a step in which the device communicates and computes nothing", high=1.0
    )


@rule("exposed_communication", monitor="steptime", limits=ExposedCommunicationLimits)
def exposed_communication(run: Run, limits: ExposedCommunicationLimits) -> Iterator[Finding]:
    """Find communication that no computation overlaps."""
    profile = read_profile(run)
    exposed = profile.content.get("exposed_communication") if profile is not None else None
    if profile is None or exposed is None or float(exposed) <= limits.exposed_share:
        return
    share = float(exposed)
    yield Finding(
        severity=Severity.WARNING,
        title=f"Communication is exposed for {percent(share)} of a step",
        detail=(
            f"For {percent(share)} of a step the device communicates without computing. Expected gain: at "
            f"most {percent(share)} of a step."
        ),
        subject=Subject(),
        evidence=(profile.evidence("exposed_communication", share, "of a step"),),
        fix=(
            "Start reductions during backward (DDP buckets, FSDP prefetch), reduce every few steps with "
            "accumulation under `no_sync()`, or send fewer bits. First check for a late rank: its peers then "
            "wait, which is not communication (`backlight trace` on all ranks)."
        ),
        refuted_if="the collectives wait for a late rank and take their usual time once it arrives.",
    )
