"""Rule ``copy_heavy``: copies and casts from one line take a share of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import ms, percent, plural, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("copy_heavy", monitor="steptime", thresholds=("copy_share",))
def copy_heavy(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find the lines whose copies take more of a step than they should."""
    profiled = read_profile(run)
    if profiled is None:
        return
    by_line: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in profiled.rows("copies"):
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
        yield Finding(
            severity=Severity.WARNING,
            title=f"{what.capitalize()} at {line or 'an unknown line'} take {percent(share)} of a step",
            detail=(
                f"{what.capitalize()}{layout} from {source} to {target} take {percent(share)} of a step "
                f"({ms(spent)}, {plural(round(calls), 'call')}), asked for by "
                f"{line or 'a line that the trace does not name'}. "
                f"Expected gain: at most {percent(share)} of a step."
            ),
            subject=Subject(line=line or None),
            evidence=(
                profiled.evidence(f"copies/{line or 'unknown line'}", share, "of a step"),
                profiled.evidence(f"copies/{line or 'unknown line'}/milliseconds", spent, "ms"),
            ),
            fix=(
                "Cast once outside of the loop, keep one type through the block (autocast, or weights in "
                "that "
                "type), and avoid .contiguous() and .clone() that nothing needs; copy from pinned memory."
            ),
            refuted_if="the same step without that line, checked for equal results, is not faster.",
        )


def _share(rows: list[Mapping[str, Any]]) -> float:
    return sum(float(row.get("share") or 0.0) for row in rows)
