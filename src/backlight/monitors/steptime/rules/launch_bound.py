"""Rule ``launch_bound``: the device stands still because the host does not launch fast enough."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import percent, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

CAUSES = ("host_bound", "launch_gap", "synchronisation")
"""Causes of idle time that lie in the host."""


@rule("launch_bound", monitor="steptime", thresholds=("launch_idle", "launch_host"))
def launch_bound(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find idle time of a device whose cause is the host that launches."""
    profiled = read_profile(run)
    device = profiled.content.get("device") if profiled is not None else None
    if profiled is None or not device:
        return
    idle = float(device.get("idle") or 0.0)
    causes = {name: float(share) for name, share in (device.get("causes") or {}).items()}
    host = sum(causes.get(name, 0.0) for name in CAUSES)
    if idle <= limits.launch_idle or host <= limits.launch_host:
        return
    main = max(CAUSES, key=lambda name: causes.get(name, 0.0))
    compiled = profiled.state("compiled regions") == "on"
    yield Finding(
        severity=Severity.WARNING,
        title=f"The device is idle for {percent(idle)} of a step, mostly launch-bound",
        detail=(
            f"The device stands still in {percent(idle)} of a step, and {percent(host)} of that is waiting "
            "for "
            f"the host ({main.replace('_', ' ')} most). Expected gain: at most {percent(idle * host)} of a "
            "step."
        ),
        subject=Subject(),
        evidence=(
            profiled.evidence("device/idle", idle, "of a step"),
            profiled.evidence(f"device/causes/{main}", causes.get(main, 0.0), "of the idle time"),
        ),
        fix=(
            (
                "The model is compiled already: try mode='reduce-overhead' (CUDA graphs), "
                if compiled
                else "Try torch.compile, with mode='reduce-overhead' for CUDA graphs, "
            )
            + "or a larger batch; remove calls that wait for the device (.item(), print of a tensor)."
        ),
        refuted_if="twice the batch takes about twice as long: then the device was the limit.",
    )
