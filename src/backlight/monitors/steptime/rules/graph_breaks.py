"""Rule ``graph_breaks``: compiled code falls back to Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import info_evidence, read_runtime_info
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count

MAX_REASONS = 3
"""Reasons that a finding lists."""


@dataclass(frozen=True)
class GraphBreaksLimits(Limits, monitor="steptime"):
    """Limits of the rule ``graph_breaks``."""

    graph_breaks: int = limit(1, "breaks of compiled graphs from which they are reported", low=1)


@rule("graph_breaks", monitor="steptime", limits=GraphBreaksLimits)
def graph_breaks(run: Run, limits: GraphBreaksLimits) -> Iterator[Finding]:
    """Report the graph breaks that torch.compile counted, with its reasons."""
    info = read_runtime_info(run)
    compiled = (info.payload.get("compilation") or {}) if info is not None else {}
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
        subject=Subject(line=_line(most[0])),
        evidence=tuple(info_evidence(info, f"{reasons[why]} x {why}") for why in most),
        fix=(
            "Compile with `fullgraph=True`: the error names the line. `TORCH_LOGS=graph_breaks` prints each "
            "break with its stack."
        ),
        refuted_if="the breaks are outside the step (logging, saving), or `fullgraph=True` is not faster.",
    )


def _line(reason: str) -> str | None:
    return reason.rpartition(" at ")[2] if " at " in reason else None
