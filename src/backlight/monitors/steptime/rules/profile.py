"""Rules on a stored profile: idle device, exposed communication, copies, logits, recomputed forwards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import peak_memory, percent, read_profile
from backlight.records import Finding, Phase, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, duration, size

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
    causes: dict[str, float] = device.get("causes") or {}
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
    shares = {line: sum(float(row["share"]) for row in rows) for line, rows in by_line.items()}
    for line, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share <= limits.copy_share:
            return
        rows = by_line[line]
        worst = max(rows, key=lambda row: float(row["share"]))
        spent = sum(float(row["device_ms"] or row["host_ms"]) for row in rows)
        calls = sum(float(row["calls"]) for row in rows)
        source, target = worst["source"] or "unknown", worst["target"] or "unknown"
        what = "Casts" if source != target else "Copies"
        layout = " that change the layout" if source == target and worst["contiguous"] is False else ""
        where = line or "unknown line"
        yield Finding(
            severity=Severity.WARNING,
            title=f"{what} at {where} take {percent(share)} of a step",
            detail=(
                f"{what}{layout} from {source} to {target} take {percent(share)} of a step "
                f"({duration(spent / 1e3)}, {count(round(calls), 'call')}) at "
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
        evidence=(profile.evidence("logits", taken, "bytes"), profile.evidence("memory/peak", peak, "bytes")),
        fix=(
            "Compute the loss over chunks of tokens, or with a fused linear cross entropy, so that the "
            "logits of all tokens never exist at once; `backlight memory` shows the live tensors before and "
            "after."
        ),
        refuted_if="the memory peak is elsewhere in the step and does not fall with a chunked loss.",
    )


@dataclass(frozen=True)
class RecomputeWithoutNeedLimits(Limits, monitor="steptime"):
    """Limits of the rule ``recompute_without_need``."""

    recompute_share: float = limit(0.05, "share of a step spent on recomputed forwards", high=1.0)
    recompute_memory: float = limit(
        0.6, "share of the memory below which the peak leaves space for what checkpointing saves", high=1.0
    )


@rule("recompute_without_need", monitor="steptime", limits=RecomputeWithoutNeedLimits)
def recompute_without_need(run: Run, limits: RecomputeWithoutNeedLimits) -> Iterator[Finding]:
    """Find checkpointing that costs a share of the step while much of the memory is free."""
    profile = read_profile(run)
    step = profile.step_ms if profile is not None else None
    if profile is None or not step:
        return
    recomputed = {
        str(m["name"]): float(m["recomputed_ms"]) for m in profile.rows("modules") if m["recomputed_ms"]
    }
    # Of nested modules only the outermost counts.
    outer = {
        name: spent
        for name, spent in recomputed.items()
        if not name or ("" not in recomputed and not any(name.startswith(f"{o}.") for o in recomputed))
    }
    spent = sum(outer.values())
    peak, capacity = peak_memory(run, profile)
    if spent / step <= limits.recompute_share or peak <= 0 or capacity <= 0:
        return
    if peak / capacity >= limits.recompute_memory:
        return
    worst = max(outer, key=lambda name: outer[name])
    share = percent(spent / step)
    yield Finding(
        severity=Severity.INFO,
        title=f"Checkpointing takes {share} of a step although memory is free",
        detail=(
            f"Recomputed forwards take {duration(spent / 1e3)}, {share} of a step, in "
            f"{count(len(outer), 'module')} (most in `{worst}`), while the peak memory is {size(peak)} of "
            f"{size(capacity)} ({percent(peak / capacity)}). Expected gain: at most {share} of a step."
        ),
        subject=Subject(module=worst or None, phase=Phase.BACKWARD),
        evidence=(
            profile.evidence(f"modules/{worst}/recomputed_ms", outer[worst], "ms"),
            profile.evidence("memory/peak", peak, "bytes"),
            profile.evidence("memory/capacity", capacity, "bytes"),
        ),
        fix="Checkpoint fewer blocks, or none; `backlight memory RECIPE --fake` predicts the peak.",
        refuted_if="the run without checkpointing does not fit, or takes as long.",
    )
