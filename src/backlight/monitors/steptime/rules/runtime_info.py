"""Rules on the runtime info of a run: threads, allocator, compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import info_evidence, percent, read_runtime_info
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run
from backlight.text import count, duration, size


@dataclass(frozen=True)
class ThreadOversubscriptionLimits(Limits, monitor="steptime"):
    """Limits of the rule ``thread_oversubscription``."""

    threads_per_core: float = limit(1.25, "threads that compute on one machine, over its cores", low=1.0)
    waited_share: float = limit(
        0.05, "share of the run that the training thread waited for a core, where that is counted", high=1.0
    )


@rule("thread_oversubscription", monitor="steptime", limits=ThreadOversubscriptionLimits)
def thread_oversubscription(run: Run, limits: ThreadOversubscriptionLimits) -> Iterator[Finding]:
    """Find ranks whose threads, with the workers of their loaders, outnumber the cores."""
    info = read_runtime_info(run)
    if info is None:
        return
    facts = info.payload
    cores, threads = int(facts.get("cores") or 0), int(facts.get("threads") or 0)
    ranks, workers = int(facts.get("local_ranks") or 1), int(facts.get("workers") or 0)
    wanted = ranks * (threads + workers)
    waited = facts.get("core_wait")
    if not cores or threads < 2 or wanted <= limits.threads_per_core * cores:
        return
    if waited is not None and float(waited) < limits.waited_share:
        return
    better = max(1, cores // ranks - workers)
    yield Finding(
        severity=Severity.INFO,
        title=f"{count(wanted, 'thread')} share {count(cores, 'core')}",
        detail=(
            f"{count(wanted, 'thread')} share {count(cores, 'core')}: {count(ranks, 'rank')} on this "
            f"machine, each with {count(threads, 'thread')} of torch and {count(workers, 'loader worker')}. "
            "Waiting threads spin and take cores from working ones. Expected gain: unknown until tried, "
            "often several-fold on a CPU."
        ),
        subject=Subject(rank=info.rank),
        evidence=(
            info_evidence(info, f"threads {threads}, workers {workers}"),
            info_evidence(info, f"cores {cores}, local ranks {ranks}"),
        ),
        fix=f"Set `OMP_NUM_THREADS={better}` (or `torch.set_num_threads({better})`) and compare both runs.",
        refuted_if=f"the same run with {count(better, 'thread')} is not faster.",
    )


def _part(run: Run, name: str) -> tuple[Event | None, dict[str, Any]]:
    """Return the runtime info and one part of it, empty where that was not recorded."""
    info = read_runtime_info(run)
    return info, (info.payload.get(name) or {}) if info is not None else {}


@dataclass(frozen=True)
class MemoryFragmentationLimits(Limits, monitor="steptime"):
    """Limits of the rule ``memory_fragmentation``."""

    fragmentation_share: float = limit(
        0.25, "share of the reserved memory that no tensor used at the peak", high=1.0
    )
    fragmentation_bytes: float = limit(2.0**28, "bytes below which that share is irrelevant (256 MiB)")


@rule("memory_fragmentation", monitor="steptime", limits=MemoryFragmentationLimits)
def memory_fragmentation(run: Run, limits: MemoryFragmentationLimits) -> Iterator[Finding]:
    """Find an allocator that reserves far more than was ever in use, or that had to empty its cache."""
    info, memory = _part(run, "memory")
    if info is None or not memory.get("reserved"):
        return
    reserved, used = float(memory["reserved"]), float(memory.get("peak") or 0.0)
    retries = int(memory.get("retries") or 0)
    lost = reserved - used
    is_fragmented = lost >= limits.fragmentation_bytes and lost / reserved > limits.fragmentation_share
    if not is_fragmented and not retries:
        return
    retried = (
        f" It emptied its cache and retried {count(retries, 'time')}, which waits for the device."
        if retries
        else ""
    )
    yield Finding(
        severity=Severity.WARNING if retries else Severity.INFO,
        title=f"{size(lost)} of GPU memory is lost to fragmentation",
        detail=(
            f"At its peak the allocator had reserved {size(reserved)} and {size(used)} were in use: "
            f"{size(lost)} ({percent(lost / reserved)}) were free between blocks.{retried} Expected gain: up "
            f"to {size(lost)} of memory."
        ),
        subject=Subject(rank=info.rank),
        evidence=(info_evidence(info, reserved, "bytes reserved"), info_evidence(info, used, "bytes in use")),
        fix=(
            "Set `PYTORCH_ALLOC_CONF=expandable_segments:True`, or pad batches to a few lengths: changing "
            "shapes leave holes."
        ),
        refuted_if="reserved memory stays the same with expandable segments.",
    )


MAX_REASONS = 3
"""Reasons that a finding lists."""


@dataclass(frozen=True)
class GraphBreaksLimits(Limits, monitor="steptime"):
    """Limits of the rule ``graph_breaks``."""

    graph_breaks: int = limit(1, "breaks of compiled graphs from which they are reported", low=1)


@rule("graph_breaks", monitor="steptime", limits=GraphBreaksLimits)
def graph_breaks(run: Run, limits: GraphBreaksLimits) -> Iterator[Finding]:
    """Report the graph breaks that torch.compile counted, with its reasons."""
    info, compiled = _part(run, "compilation")
    reasons = {str(why): int(times) for why, times in (compiled.get("graph_breaks") or {}).items()}
    breaks = sum(reasons.values())
    if info is None or breaks < limits.graph_breaks:
        return
    most = sorted(reasons, key=lambda why: -reasons[why])[:MAX_REASONS]
    more = f" and {count(len(reasons) - MAX_REASONS, 'more reason')}" if len(reasons) > MAX_REASONS else ""
    yield Finding(
        severity=Severity.WARNING,
        title=f"torch.compile has {count(breaks, 'graph break')}",
        detail=(
            f"{count(breaks, 'graph break')} split the compiled code into "
            f"{compiled.get('graphs', 'several')} graphs: {'; '.join(most)}{more}. Expected gain: unknown "
            "until tried; code between the graphs runs uncompiled, and nothing is fused across a break."
        ),
        subject=Subject(line=most[0].rpartition(" at ")[2] if " at " in most[0] else None),
        evidence=tuple(info_evidence(info, f"{reasons[why]} x {why}") for why in most),
        fix=(
            "Compile with `fullgraph=True`: the error names the line. `TORCH_LOGS=graph_breaks` prints each "
            "break with its stack."
        ),
        refuted_if="the breaks are outside the step (logging, saving), or `fullgraph=True` is not faster.",
    )


@dataclass(frozen=True)
class RecompilationsLimits(Limits, monitor="steptime"):
    """Limits of the rule ``recompilations``."""

    recompilations: int = limit(
        3,
        "compilations of one function beyond its first: one is usual, when a shape turns out to be dynamic",
        source="torch._dynamo: automatic_dynamic_shapes compiles a second time; the limit is chosen",
        low=1,
    )


@rule("recompilations", monitor="steptime", limits=RecompilationsLimits)
def recompilations(run: Run, limits: RecompilationsLimits) -> Iterator[Finding]:
    """Report functions that were compiled more often than changing shapes explain, with the reason."""
    info, compiled = _part(run, "compilation")
    if info is None:
        return
    for row in compiled.get("recompiled") or ():
        times = int(row.get("count") or 0)
        if times < limits.recompilations:
            continue
        seconds = float(row.get("seconds") or 0.0)
        reason = str(row.get("reason") or "no reason was recorded")
        cost = f", which took {duration(seconds)} in all" if seconds else ""
        gain = duration(seconds) if seconds else "that time"
        yield Finding(
            severity=Severity.WARNING,
            title=f"`{row.get('function')}` was recompiled {count(times, 'time')}",
            detail=(
                f"`{row.get('function')}` was compiled {count(times, 'time')} beyond the first{cost}: "
                f"{reason}. Expected gain: {gain}, and the steps that ran uncompiled after the recompilation "
                "limit."
            ),
            subject=Subject(line=str(row.get("line") or "") or None),
            evidence=(info_evidence(info, times, "compilations beyond the first"),),
            fix=(
                "Mark the changing dimension (`torch._dynamo.mark_dynamic`), compile with `dynamic=True`, "
                "pad batches to a few lengths, or keep changing numbers out of the compiled code. "
                "`TORCH_LOGS=recompiles` prints each guard that failed."
            ),
            refuted_if="all recompilations happened in the first steps.",
        )


@rule("cuda_graphs_skipped", monitor="steptime")
def cuda_graphs_skipped(run: Run, limits: Limits) -> Iterator[Finding]:
    """Report how often the compiler skipped CUDA graphs, with the reasons that it logged."""
    info, compiled = _part(run, "compilation")
    skips = int(compiled.get("cuda_graph_skips") or 0)
    if info is None or not skips:
        return
    reasons = [str(reason) for reason in compiled.get("cuda_graph_reasons") or ()]
    why = "; ".join(reasons) or "the compiler recorded no reason"
    yield Finding(
        severity=Severity.WARNING,
        title=f"CUDA graphs were skipped for {count(skips, 'graph')}",
        detail=(
            f"CUDA graphs were requested but skipped for {count(skips, 'graph')}: {why}. Expected gain: the "
            "time the GPU waits for launches (see `launch_bound`)."
        ),
        subject=Subject(),
        evidence=(info_evidence(info, skips, "graphs"), *(info_evidence(info, reason) for reason in reasons)),
        fix=(
            "Remove the cause: CPU tensors inside the graph, inputs that are modified in place, dynamic "
            "shapes. `TORCH_LOGS=cudagraphs` prints each skip with its stack."
        ),
        refuted_if="the skipped graphs are not part of a steady step.",
    )
