"""Causes of slow steps that a profile names: no loader workers, single values, tiny operations, saving."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backlight.records import Phase
from backlight.text import count, duration, percent

if TYPE_CHECKING:
    from backlight.diagnose.profile.line_samples import LineTime
    from backlight.diagnose.profile.result import ProfileResult

CAUSE_SHARE = 0.1
"""Share of a step from which a cause is named."""

READS_PER_STEP = 3
"""Reads of single values in a step from which they are a cause; one of the loss is usual."""

TINY_CALLS = 1000
"""Operations of a step from which their number is a cause, if they are short."""

SHORT_CALL_MS = 0.1
"""Duration of a mean operation below which calling it takes as long as its work."""

READ = "aten::_local_scalar_dense"
"""Operator below ``.item()``, ``float(tensor)`` and an ``if`` on a tensor."""

_READING = re.compile(r"\.(item|tolist)\(|\b(float|int|bool)\(")
_SAVING = re.compile(r"\b(save|save_file|dump|savez|to_csv|save_pretrained|save_checkpoint)\(")


@dataclass(frozen=True)
class Cause:
    """One cause: the ``share`` of a step that it takes, and its name and fix in words."""

    share: float
    text: str


def find_causes(result: ProfileResult) -> list[Cause]:
    """Return the causes that a profile shows, the largest first."""
    if result.step is None:
        return []
    found = (cause for find in (_workers, _reads, _tiny, _saving) for cause in find(result))
    return sorted((one for one in found if one.share >= CAUSE_SHARE), key=lambda one: -one.share)


def _workers(result: ProfileResult) -> Iterator[Cause]:
    workers = next((row for row in result.optimizations if row.name == "data-loader workers"), None)
    if Phase.DATA in result.phases and workers is not None and workers.state == "off":
        yield Cause(
            result.phases[Phase.DATA].share,
            "data is loaded between the steps, num_workers=0: raise num_workers",
        )


def _reads(result: ProfileResult) -> Iterator[Cause]:
    if text := read_line(result):
        yield Cause(_at(result, _READING)[0], f"{text}: keep values on the device, read them every few steps")


def read_line(result: ProfileResult) -> str:
    """Return how many single values a step reads, and the line that takes most; empty where they are few."""
    calls = sum(row.calls for row in result.operators or () if row.name == READ)
    read = f".item() or its like reads {count(round(calls), 'value')} a step{_at(result, _READING)[1]}"
    return read if calls >= READS_PER_STEP else ""


def _tiny(result: ProfileResult) -> Iterator[Cause]:
    rows = [row for row in result.operators or () if row.calls]
    calls, spent = sum(row.calls for row in rows), sum(row.host_ms for row in rows)
    whole = result.traced_step_ms or 0.0
    if calls < TINY_CALLS or not whole or spent / calls > SHORT_CALL_MS or result.device is not None:
        return
    top = next((row for row in result.lines or () if row.line and row.phase == Phase.FORWARD), None)
    yield Cause(
        min(1.0, spent / whole),
        f"{calls:,.0f} tiny operations a step, {duration(1e-3 * spent / calls)} each"
        f"{f', at {top.line}' if top is not None else ''}: work on whole tensors, or compile",
    )


def _saving(result: ProfileResult) -> Iterator[Cause]:
    share, line = _at(result, _SAVING)
    yield Cause(share, f"files are saved at every step{line}: save every few hundred steps")


def _at(result: ProfileResult, pattern: re.Pattern[str]) -> tuple[float, str]:
    """Return the share of a step of the lines whose source matches, and the one that takes most."""
    rows = [row for row in result.lines or () if row.line and pattern.search(_source(row))]
    step = result.step.median_ms if result.step is not None else 0.0
    if not rows or not step:
        return 0.0, ""
    return sum(row.ms for row in rows) / step, f", at {max(rows, key=lambda row: row.ms).line}"


def _source(row: LineTime) -> str:
    path, _, number = row.line.rpartition(":")
    return linecache.getline(path, int(number)) if number.isdigit() else ""


def cause_line(cause: Cause) -> str:
    """Return a cause with its share."""
    return f"{cause.text} ({percent(cause.share)} of a step)"
