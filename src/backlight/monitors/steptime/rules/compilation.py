"""Rule ``compilation``: graph breaks, recompilations and CUDA graphs that torch.compile did not use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import info_evidence, read_runtime_info
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run
from backlight.text import count, duration

MAX_REASONS = 3
"""Reasons that a finding lists."""


@dataclass(frozen=True)
class CompilationLimits(Limits, monitor="steptime"):
    """Limits of the rule ``compilation``."""

    graph_breaks: int = limit(1, "breaks of compiled graphs from which they are reported", low=1)
    recompilations: int = limit(
        3,
        "compilations of one function beyond its first: one is usual, when a shape turns out to be dynamic",
        source="torch._dynamo: automatic_dynamic_shapes compiles a second time; the limit is chosen",
        low=1,
    )


@rule("compilation", monitor="steptime", limits=CompilationLimits)
def compilation(run: Run, limits: CompilationLimits) -> Iterator[Finding]:
    """Report what the compiler counted: graph breaks, repeated compilations, skipped CUDA graphs."""
    info = read_runtime_info(run)
    if info is None:
        return
    compiled = info.payload.get("compilation") or {}
    for find in (_graph_breaks, _recompilations, _skipped_cuda_graphs):
        yield from find(info, compiled, limits)


def _graph_breaks(info: Event, compiled: dict[str, Any], limits: CompilationLimits) -> Iterator[Finding]:
    """Report the graph breaks that torch.compile counted, with its reasons."""
    reasons = {str(why): int(times) for why, times in (compiled.get("graph_breaks") or {}).items()}
    breaks = sum(reasons.values())
    if breaks < limits.graph_breaks:
        return
    most = sorted(reasons, key=lambda why: -reasons[why])[:MAX_REASONS]
    more = f" and {count(len(reasons) - MAX_REASONS, 'more reason')}" if len(reasons) > MAX_REASONS else ""
    yield Finding(
        severity=Severity.INFO,
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


def _recompilations(info: Event, compiled: dict[str, Any], limits: CompilationLimits) -> Iterator[Finding]:
    """Report functions that were compiled more often than changing shapes explain, with the reason."""
    for row in compiled.get("recompiled") or ():
        times = int(row.get("count") or 0)
        if times < limits.recompilations:
            continue
        seconds = float(row.get("seconds") or 0.0)
        reason = str(row.get("reason") or "no reason was recorded")
        cost = f", which took {duration(seconds)} in all" if seconds else ""
        gain = duration(seconds) if seconds else "that time"
        yield Finding(
            severity=Severity.INFO,
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


def _skipped_cuda_graphs(
    info: Event, compiled: dict[str, Any], limits: CompilationLimits
) -> Iterator[Finding]:
    """Report how often the compiler skipped CUDA graphs, with the reasons that it logged."""
    skips = int(compiled.get("cuda_graph_skips") or 0)
    if not skips:
        return
    reasons = [str(reason) for reason in compiled.get("cuda_graph_reasons") or ()]
    why = "; ".join(reasons) or "the compiler recorded no reason"
    yield Finding(
        severity=Severity.INFO,
        title=f"CUDA graphs were skipped for {count(skips, 'graph')}",
        detail=(
            f"CUDA graphs were requested but skipped for {count(skips, 'graph')}: {why}. Expected gain: the "
            "time the GPU waits for launches (see `bottleneck`)."
        ),
        subject=Subject(),
        evidence=(info_evidence(info, skips, "graphs"), *(info_evidence(info, reason) for reason in reasons)),
        fix=(
            "Remove the cause: CPU tensors inside the graph, inputs that are modified in place, dynamic "
            "shapes. `TORCH_LOGS=cudagraphs` prints each skip with its stack."
        ),
        refuted_if="the skipped graphs are not part of a steady step.",
    )
