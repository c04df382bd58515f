"""Rule ``launch_bound``: the device is idle because the host does not launch fast enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import percent, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

HOST_CAUSES = ("host_bound", "launch_gap", "synchronisation")
"""Causes of idle time on the host."""


@dataclass(frozen=True)
class LaunchBoundLimits(Limits, monitor="steptime"):
    """Limits of the rule ``launch_bound``."""

    launch_idle: float = limit(0.2, "share of a step in which the device is idle", high=1.0)
    launch_host: float = limit(
        0.5, "share of that idle time in which the device waits for the host to launch", high=1.0
    )


@rule("launch_bound", monitor="steptime", limits=LaunchBoundLimits)
def launch_bound(run: Run, limits: LaunchBoundLimits) -> Iterator[Finding]:
    """Find idle time of a device that the launching host causes."""
    profile = read_profile(run)
    device = profile.content.get("device") if profile is not None else None
    if profile is None or not device:
        return
    idle = float(device.get("idle") or 0.0)
    causes = {name: float(share) for name, share in (device.get("causes") or {}).items()}
    host = sum(causes.get(name, 0.0) for name in HOST_CAUSES)
    if idle <= limits.launch_idle or host <= limits.launch_host:
        return
    main = max(HOST_CAUSES, key=lambda name: causes.get(name, 0.0))
    attempt = (
        "The model is compiled already: try mode='reduce-overhead' (CUDA graphs), "
        if profile.state("compiled regions") == "on"
        else "Try torch.compile, with mode='reduce-overhead' for CUDA graphs, "
    )
    yield Finding(
        severity=Severity.WARNING,
        title=f"The GPU is idle for {percent(idle)} of the step, mostly launch-bound",
        detail=(
            f"The GPU is idle for {percent(idle)} of the step; {percent(host)} of the idle time is "
            f"launch-bound (mostly {main.replace('_', ' ')}). Expected gain: at most {percent(idle * host)} "
            "of a step."
        ),
        subject=Subject(),
        evidence=(
            profile.evidence("device/idle", idle, "of a step"),
            profile.evidence(f"device/causes/{main}", causes.get(main, 0.0), "of the idle time"),
        ),
        fix=(
            f"{attempt}or a larger batch; remove calls that wait for the device (`.item()`, printing a "
            "tensor)."
        ),
        refuted_if="doubling the batch doubles the step time: the device is then the limit.",
    )
