"""Rules on the time of a device in a step: idle while the host launches, exposed communication, copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import ms, percent, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count

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


@dataclass(frozen=True)
class CopyHeavyLimits(Limits, monitor="steptime"):
    """Limits of the rule ``copy_heavy``."""

    copy_share: float = limit(
        0.05,
        "share of a step that copies from one line take: a well-kept model casts and lays out in about 1 %",
        high=1.0,
    )


@rule("copy_heavy", monitor="steptime", limits=CopyHeavyLimits)
def copy_heavy(run: Run, limits: CopyHeavyLimits) -> Iterator[Finding]:
    """Find the lines whose copies take more of a step than they should."""
    profile = read_profile(run)
    if profile is None:
        return
    by_line: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in profile.rows("copies"):
        by_line[str(row.get("line") or "")].append(row)
    for line, rows in sorted(by_line.items(), key=lambda item: -_share(item[1])):
        share = _share(rows)
        if share <= limits.copy_share:
            return
        worst = max(rows, key=lambda row: float(row.get("share") or 0.0))
        spent = sum(float(row.get("device_ms") or row.get("host_ms") or 0.0) for row in rows)
        calls = sum(float(row.get("calls") or 0.0) for row in rows)
        source, target = worst.get("source") or "unknown", worst.get("target") or "unknown"
        what = "casts" if source != target else "copies"
        layout = " that change the layout" if what == "copies" and worst.get("contiguous") is False else ""
        where = line or "unknown line"
        yield Finding(
            severity=Severity.WARNING,
            title=f"{what.capitalize()} at {where} take {percent(share)} of a step",
            detail=(
                f"{what.capitalize()}{layout} from {source} to {target} take {percent(share)} of a step "
                f"({ms(spent)}, {count(round(calls), 'call')}) at "
                f"{line or 'a line that is not in the trace'}. Expected gain: at most {percent(share)} of a "
                "step."
            ),
            subject=Subject(line=line or None),
            evidence=(
                profile.evidence(f"copies/{where}", share, "of a step"),
                profile.evidence(f"copies/{where}/milliseconds", spent, "ms"),
            ),
            fix=(
                "Cast once outside the loop, keep one dtype through the block (autocast, or weights in that "
                "dtype), drop unneeded `.contiguous()` and `.clone()` calls, and copy from pinned memory."
            ),
            refuted_if="the same step without that line, checked for equal results, is not faster.",
        )


def _share(rows: list[Mapping[str, Any]]) -> float:
    return sum(float(row.get("share") or 0.0) for row in rows)
