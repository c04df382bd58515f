"""Rule ``cuda_graphs_skipped``: CUDA graphs were requested and not used."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.findings.limits import Limits
from backlight.monitors.steptime.model.evidence import info_evidence, read_runtime_info
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


@rule("cuda_graphs_skipped", monitor="steptime")
def cuda_graphs_skipped(run: Run, limits: Limits) -> Iterator[Finding]:
    """Report how often the compiler skipped CUDA graphs, with the reasons that it logged."""
    info = read_runtime_info(run)
    compiled = (info.payload.get("compilation") or {}) if info is not None else {}
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
        evidence=(
            info_evidence(info, skips, "graphs"),
            *(info_evidence(info, reason) for reason in reasons),
        ),
        fix=(
            "Remove the cause: CPU tensors inside the graph, inputs that are modified in place, dynamic "
            "shapes. `TORCH_LOGS=cudagraphs` prints each skip with its stack."
        ),
        refuted_if="the skipped graphs are not part of a steady step.",
    )
