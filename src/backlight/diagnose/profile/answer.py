"""Answer of a profile: what limits the step, the facts behind it, and the tables."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backlight import codec
from backlight.answer import Answer, ended
from backlight.monitors.steptime.model.step_tables import profile_tables
from backlight.records import Phase
from backlight.text import count, duration, listed, number, percent
from backlight.trace.step_limits import LIMITS, Limit, limit_of

if TYPE_CHECKING:
    from backlight.diagnose.profile.line_samples import LineTime
    from backlight.diagnose.profile.result import ProfileResult
    from backlight.records import Finding


LINES, SHOWN = 4, 3
"""Source lines, and parts of another fact, that are listed."""

LINE_SHARE = 0.05
"""Share of a step from which a source line is listed."""


def answer(result: ProfileResult, findings: Sequence[Finding] = ()) -> Answer:
    """Return the answer of a profile; that of a rank that is not traced has no facts and no tables."""
    notes = [f"not measured: {trouble}" for trouble in result.not_measured]
    if result.trace is not None:
        notes.append(f"trace: {result.trace} (chrome://tracing, ui.perfetto.dev)")
    if result.rank != 0:
        return Answer(_verdict(result), result, notes=(*notes, *ended(result.exit_code)))
    controls = tuple(control.text for control in result.controls)
    return Answer(
        _verdict(result),
        result,
        facts=(*controls, *_facts(result)),
        tables=tuple(profile_tables(codec.plain(result)).values()),
        notes=(*notes, *ended(result.exit_code)),
        findings=tuple(findings),
    )


def _verdict(result: ProfileResult) -> str:
    """Return what limits the step, in one line."""
    step = result.step
    if step is None:
        return f"step not measured: {result.not_measured[-1]} (first {duration(result.first_ms / 1e3)})"
    half = (step.high_ms - step.low_ms) / 2
    line = f"step {step.median_ms:.1f} ms ± {half:.1f}"
    exposed = result.exposed_communication
    limit = limit_of(result.device.idle, result.device.causes, exposed) if result.device is not None else None
    if limit is Limit.COMMUNICATION and exposed is not None:
        return f"{line}, limited by communication: {percent(exposed)} of it with no computation"
    if result.device is not None and limit is Limit.DEVICE:
        kind = (
            f": {result.kinds[0].name} is {percent(result.kinds[0].share)} of its time"
            if result.kinds
            else ""
        )
        return f"{line}, limited by the device (busy {percent(1 - result.device.idle)}){kind}"
    name, phase = max(result.phases.items(), key=lambda item: item[1].share)
    line += f", mostly {name.replace('_', ' ')} ({percent(phase.share)})"
    top = next((row for row in result.lines or () if row.phase == name and row.line), None)
    where = "" if top is None else f": {line_text(top)}"
    causes = find_causes(result)
    return f"{line}{where}; {cause_line(causes[0])}" if causes else f"{line}{where}"


def _facts(result: ProfileResult) -> list[str]:
    """Return the lines behind the verdict, the most important first."""
    step = result.step.median_ms if result.step is not None else 0.0
    # Shares of the median step add up to it; medians of the phases do not.
    phases = ", ".join(f"{name.replace('_', ' ')} {p.share * step:.1f}" for name, p in result.phases.items())
    above, dropped = _verdict(result), f"{count(result.warmup_dropped, 'warm-up step')} dropped"
    lines = [row for row in result.lines or () if row.line and row.ms >= LINE_SHARE * step]
    lines = [row for row in lines if line_text(row) not in above]
    copies = [row for row in result.copies or () if row.share >= LIMITS.copy][:1]
    off = [row.name for row in result.optimizations if row.state == "off"]
    named = {
        **{f"cause {number}": cause_line(cause) for number, cause in enumerate(find_causes(result)[1:], 2)},
        "single values": read_line(result),
        "phases, ms": f"{phases} ({dropped}; the first took {duration(result.first_ms / 1e3)})"
        if phases
        else "",
        **{f"line {number}": line_text(row) for number, row in enumerate(lines[:LINES], 1)},
        "optimizers, ms": ", ".join(
            f"{optimizer.type} {optimizer.median_ms:.2f}" for optimizer in result.optimizers
        ),
        "device": result.device.statement if result.device is not None else "",
        "kinds of operation": _shares([(row.name, row.share) for row in result.kinds or ()]),
        "self time of modules": _modules(result),
        "copies": "".join(
            f"{row.line or 'line not recorded'}, {percent(row.share)} of a step" for row in copies
        ),
        "throughput": _throughput(result),
        "not in use": listed(off),
    }
    return [f"{name}: {text}" for name, text in named.items() if text]


def line_name(row: LineTime) -> str:
    """Return ``train.py:41 (get_batch)``."""
    if not row.line:
        return "no line of the script"
    return row.line if row.function in {"", "<module>"} else f"{row.line} ({row.function})"


def line_text(row: LineTime) -> str:
    """Return ``train.py:41 (get_batch) 20.1 ms, 86 % of other``."""
    return f"{line_name(row)} {row.ms:.1f} ms, {percent(row.share)} of {row.phase.replace('_', ' ')}"


def _modules(result: ProfileResult) -> str:
    exclusive = {
        m.name or "(model)": m.forward_exclusive_ms + m.backward_exclusive_ms for m in result.modules or ()
    }
    whole = sum(exclusive.values()) or 1.0
    return _shares(sorted(((name, ms / whole) for name, ms in exclusive.items()), key=lambda row: -row[1]))


def _throughput(result: ProfileResult) -> str:
    if result.step is None:
        return ""
    rate = f"{number(1e3 / result.step.median_ms)} steps/s"
    if result.tokens_per_second is None:
        return rate
    reached = f", MFU {percent(result.mfu)}" if result.mfu is not None else ""
    return f"{rate}, {result.tokens_per_second:,.0f} tokens/s{reached}"


def _shares(rows: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in rows[:SHOWN] if share > 0)


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
class SlowCause:
    """One cause: the ``share`` of a step that it takes, and its name and fix in words."""

    share: float
    text: str


def find_causes(result: ProfileResult) -> list[SlowCause]:
    """Return the causes that a profile shows, the largest first."""
    if result.step is None:
        return []
    causes = (cause for find in (_workers, _reads, _tiny, _saving) for cause in find(result))
    return sorted((cause for cause in causes if cause.share >= CAUSE_SHARE), key=lambda cause: -cause.share)


def _workers(result: ProfileResult) -> Iterator[SlowCause]:
    workers = next((row for row in result.optimizations if row.name == "data-loader workers"), None)
    if Phase.DATA in result.phases and workers is not None and workers.state == "off":
        yield SlowCause(
            result.phases[Phase.DATA].share,
            "data is loaded between the steps, num_workers=0: raise num_workers",
        )


def _reads(result: ProfileResult) -> Iterator[SlowCause]:
    if text := read_line(result):
        yield SlowCause(
            _at(result, _READING)[0], f"{text}: keep values on the device, read them every few steps"
        )


def read_line(result: ProfileResult) -> str:
    """Return how many single values a step reads, and the line that takes most; empty where they are few."""
    calls = sum(row.calls for row in result.operators or () if row.name == READ)
    read = f".item() or its like reads {count(round(calls), 'value')} a step{_at(result, _READING)[1]}"
    return read if calls >= READS_PER_STEP else ""


def _tiny(result: ProfileResult) -> Iterator[SlowCause]:
    rows = [row for row in result.operators or () if row.calls]
    calls, spent = sum(row.calls for row in rows), sum(row.host_ms for row in rows)
    whole = result.traced_step_ms or 0.0
    if calls < TINY_CALLS or not whole or spent / calls > SHORT_CALL_MS or result.device is not None:
        return
    top = next((row for row in result.lines or () if row.line and row.phase == Phase.FORWARD), None)
    yield SlowCause(
        min(1.0, spent / whole),
        f"{calls:,.0f} tiny operations a step, {duration(1e-3 * spent / calls)} each"
        f"{f', at {top.line}' if top is not None else ''}: work on whole tensors, or compile",
    )


def _saving(result: ProfileResult) -> Iterator[SlowCause]:
    share, line = _at(result, _SAVING)
    yield SlowCause(share, f"files are saved at every step{line}: save every few hundred steps")


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


def cause_line(cause: SlowCause) -> str:
    """Return a cause with its share."""
    return f"{cause.text} ({percent(cause.share)} of a step)"
