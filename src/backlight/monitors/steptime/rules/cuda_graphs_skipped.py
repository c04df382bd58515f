"""Rule ``cuda_graphs_skipped``: CUDA graphs were asked for and not used."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import CIRCUMSTANCES, circumstances, plural
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("cuda_graphs_skipped", monitor="steptime")
def cuda_graphs_skipped(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Tell how often the compiler left CUDA graphs out, with the reasons that it logged."""
    told = circumstances(run)
    compiled = (told.payload.get("compilation") or {}) if told is not None else {}
    skips = int(compiled.get("cuda_graph_skips") or 0)
    if told is None or not skips:
        return
    reasons = [str(reason) for reason in compiled.get("cuda_graph_reasons") or ()]
    why = "; ".join(reasons) or "the compiler recorded no reason"
    yield Finding(
        severity=Severity.WARNING,
        title=f"CUDA graphs were skipped for {plural(skips, 'graph')}",
        detail=(
            f"CUDA graphs were asked for and skipped for {plural(skips, 'graph')}: {why}. "
            "Expected gain: the time in which the device waits for launches, see launch_bound."
        ),
        subject=Subject(),
        evidence=(
            Evidence(f"events/{CIRCUMSTANCES}", told.step, skips, "graphs"),
            *(Evidence(f"events/{CIRCUMSTANCES}", told.step, reason) for reason in reasons),
        ),
        fix=(
            "Remove the reason: tensors on the CPU inside the graph, inputs that are changed in place, "
            "dynamic "
            "shapes. TORCH_LOGS=cudagraphs prints each with its stack."
        ),
        refuted_if="the skipped graphs are no part of a steady step.",
    )
