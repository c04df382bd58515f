"""Rule ``recompilations``: a function is compiled repeatedly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import info_evidence, ms, read_runtime_info
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


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
    info = read_runtime_info(run)
    compiled = (info.payload.get("compilation") or {}) if info is not None else {}
    if info is None:
        return
    for row in compiled.get("recompiled") or ():
        times = int(row.get("count") or 0)
        if times < limits.recompilations:
            continue
        seconds = float(row.get("seconds") or 0.0)
        reason = str(row.get("reason") or "no reason was recorded")
        cost = f", which took {ms(1e3 * seconds)} in all" if seconds else ""
        gain = ms(1e3 * seconds) if seconds else "that time"
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
