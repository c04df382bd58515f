"""Rule ``recompilations``: a function is compiled again and again."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import CIRCUMSTANCES, circumstances, ms, plural
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("recompilations", monitor="steptime", thresholds=("recompilations",))
def recompilations(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Tell the functions that were compiled more often than changing shapes explain, with the reason."""
    told = circumstances(run)
    compiled = (told.payload.get("compilation") or {}) if told is not None else {}
    if told is None:
        return
    for row in compiled.get("recompiled") or ():
        count = int(row.get("count") or 0)
        if count < limits.recompilations:
            continue
        spent = float(row.get("seconds") or 0.0)
        reason = str(row.get("reason") or "no reason was recorded")
        cost = f", which took {ms(1e3 * spent)} in all" if spent else ""
        yield Finding(
            severity=Severity.WARNING,
            title=f"`{row.get('function')}` was recompiled {plural(count, 'time')}",
            detail=(
                f"{row.get('function')} was compiled {plural(count, 'time')} beyond the first{cost}: "
                f"{reason}. "
                f"Expected gain: {ms(1e3 * spent) if spent else 'that time'}, and the steps that ran "
                "uncompiled "
                "after the limit of recompilations."
            ),
            subject=Subject(line=str(row.get("line") or "") or None),
            evidence=(
                Evidence(f"events/{CIRCUMSTANCES}", told.step, count, "compilations beyond the first"),
            ),
            fix=(
                "Mark the changing dimension (torch._dynamo.mark_dynamic), compile with dynamic=True, pad "
                "batches "
                "to a few lengths, or keep numbers that change out of the compiled code. "
                "TORCH_LOGS=recompiles prints each guard that failed."
            ),
            refuted_if="all of them happened in the first steps and none in the steady ones.",
        )
