"""Rule ``copy_heavy``: copies and casts from one line take a share of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.evidence import ms, percent, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


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
        where = line or "unknown line"
        yield Finding(
            severity=Severity.WARNING,
            title=f"{what.capitalize()} at {where} take {percent(share)} of a step",
            detail=(
                f"{what.capitalize()}{layout} from {source} to {target} take {percent(share)} of a step "
                f"({ms(spent)}, {count(round(calls), 'call')}) at "
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


def _share(rows: list[Mapping[str, Any]]) -> float:
    return sum(float(row.get("share") or 0.0) for row in rows)
