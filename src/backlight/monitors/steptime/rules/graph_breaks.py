"""Rule ``graph_breaks``: compiled code falls back to Python in between."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import CIRCUMSTANCES, circumstances, plural
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

SHOWN = 3
"""Reasons that the claim and its evidence list."""


@rule("graph_breaks", monitor="steptime", thresholds=("graph_breaks",))
def graph_breaks(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Tell the breaks that torch.compile counted, with the reasons that it gave."""
    told = circumstances(run)
    compiled = (told.payload.get("compilation") or {}) if told is not None else {}
    reasons = {str(why): int(count) for why, count in (compiled.get("graph_breaks") or {}).items()}
    breaks = sum(reasons.values())
    if told is None or breaks < limits.graph_breaks:
        return
    most = sorted(reasons, key=lambda why: -reasons[why])[:SHOWN]
    more = f" and {plural(len(reasons) - SHOWN, 'more reason')}" if len(reasons) > SHOWN else ""
    yield Finding(
        severity=Severity.WARNING,
        title=f"torch.compile broke the graph {plural(breaks, 'time')}",
        detail=(
            f"Compilation broke {plural(breaks, 'time')}, so that {compiled.get('graphs', 'several')} graphs "
            "stand "
            f"where fewer could: {'; '.join(most)}{more}. Expected gain: what lies between the graphs runs "
            "uncompiled, and nothing is fused across a break; how much that is must be tried."
        ),
        subject=Subject(line=_line(most[0])),
        evidence=tuple(Evidence(f"events/{CIRCUMSTANCES}", told.step, f"{reasons[w]} x {w}") for w in most),
        fix=(
            "Compile with fullgraph=True: the error names the line. TORCH_LOGS=graph_breaks prints each "
            "break with "
            "its stack."
        ),
        refuted_if=(
            "the breaks are outside of the step (logging, saving), or the step is as fast with fullgraph."
        ),
    )


def _line(reason: str) -> str | None:
    return reason.rpartition(" at ")[2] if " at " in reason else None
