"""What limits the steps of a trace, in one line, and the facts behind it in at most ten."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from backlight.text import duration, percent
from backlight.trace.analysis import RankAnalysis, exposed_communication, idle_share
from backlight.trace.classification import Kind, short
from backlight.trace.utilization import Idle

IDLE_SHARE = 0.2
"""Share of a step from which idle time is what limits it, where communication does not."""

EXPOSED_SHARE = 0.2
"""Share of a step from which communication without computation is what limits it."""

KIND_SHARE = 0.2
"""Share of the host's time from which a kind of operation is named."""

SHOWN = 3
"""Kinds, operators and parts of the path that a line names."""

CAUSES = {
    "host_bound": "the next kernel was not launched yet",
    "synchronisation": "the host had waited for the device",
    "data": "the host waited for a DataLoader",
    "communication": "the host waited for a collective",
    "launch_gap": "launch latency",
    "queued": "launched work waited for another stream or rank",
    "unknown": "for a reason that the trace does not show",
}


def verdict(rank: RankAnalysis) -> str:
    """Return what limits the steps, in one line."""
    lengths = _lengths(rank)
    what = f"{'step' if rank.steps[0].number is not None else 'trace of'} {_time(float(np.median(lengths)))}"
    idle, exposed = idle_share(rank), exposed_communication(rank) or 0.0
    if idle is None:
        phases = [row for row in rank.phases if row.share]
        where = f": mostly {phases[0].name} ({percent(phases[0].share)})" if len(phases) > 1 else ""
        kinds = [row for row in rank.kinds if row.name != Kind.OTHER and row.share >= KIND_SHARE]
        kind = f"; {kinds[0].name} takes {percent(kinds[0].share)} of it" if kinds else ""
        return f"{what}, no device{where}{kind}"
    causes = _causes(rank)
    if exposed >= max(EXPOSED_SHARE, idle):
        return f"{what}, limited by communication: {percent(exposed)} of it with no computation"
    if idle >= IDLE_SHARE and causes:
        name, spent = next(iter(causes.items()))
        whole = sum(causes.values())
        part = percent(spent / whole)
        return f"{what}, device idle {percent(idle)}: mostly {CAUSES[name]} ({part} of the idle time)"
    top = rank.kinds[0]
    busy = f"limited by the device (busy {percent(1 - idle)})"
    return f"{what}, {busy}: {top.name} is {percent(top.share)} of its time"


def facts(rank: RankAnalysis) -> list[str]:
    """Return at most ten lines behind the verdict."""
    lengths = _lengths(rank)
    causes, path = _causes(rank), _path(rank)
    whole, length = sum(row.duration for row in rank.usual_steps) or 1, sum(path.values()) or 1
    exposed = exposed_communication(rank)
    lines = {
        "steps": f"{len(lengths)}, {_time(min(lengths))} to {_time(max(lengths))}"
        if len(lengths) > 1
        else "",
        f"{'device' if rank.device_total else 'host'} time": _shares([(r.name, r.share) for r in rank.kinds]),
        "phases": _shares([(row.name, row.share) for row in rank.phases])
        if sum(row.share > 0 for row in rank.phases) > 1
        else "",
        "operators": _shares(_whole_operators(rank)[:2]),
        "idle, of the steps": _shares([(name.replace("_", "-"), ns / whole) for name, ns in causes.items()]),
        "communication alone": "" if exposed is None else f"{percent(exposed)} of a step",
        "critical path": _shares([(name, spent / length) for name, spent in path.items()]),
        "copies": next((f"{row.line}, {percent(row.share)}" for row in rank.copies if row.line), ""),
        "launches": _launches(rank),
        "full queue": _full_queue(rank),
    }
    return [f"{name}: {text}" for name, text in lines.items() if text]


def _whole_operators(analysis: RankAnalysis) -> list[tuple[str, float]]:
    """Return the share of each operator over all phases."""
    shares: dict[str, float] = {}
    for row in analysis.operators:
        shares[row.name] = shares.get(row.name, 0.0) + row.share
    return sorted(((short(name, 28), share) for name, share in shares.items()), key=lambda item: -item[1])


def _launches(analysis: RankAnalysis) -> str:
    most = max(analysis.launches, key=lambda row: row.calls, default=None)
    if most is None:
        return ""
    shorter = sum(row.short for row in analysis.launches) / sum(row.calls for row in analysis.launches)
    delay = f"median delay {_time(most.delay.median)}"
    return f"{delay}; {percent(shorter)} of the kernels are shorter than their launch"


def _full_queue(analysis: RankAnalysis) -> str:
    longest = max(analysis.streams, key=lambda row: row.full, default=None)
    if longest is None or not longest.full:
        return ""
    return f"stream {longest.stream} for {_time(longest.full)}: the host runs ahead as far as it can"


def _lengths(analysis: RankAnalysis) -> list[int]:
    return list({row.number: row.duration for row in analysis.steps}.values())


def _causes(analysis: RankAnalysis) -> dict[str, int]:
    spent = {f.name: sum(getattr(row.idle, f.name) for row in analysis.usual_steps) for f in fields(Idle)}
    return {name: ns for name, ns in sorted(spent.items(), key=lambda item: -item[1]) if ns}


def _path(analysis: RankAnalysis) -> dict[str, int]:
    parts: dict[str, int] = {}
    for path in {id(row.critical_path): row.critical_path for row in analysis.usual_steps}.values():
        for name, spent in (
            *((f"host {name}", ns) for name, ns in path.host.items()),
            *((f"device {name}", ns) for name, ns in path.device.items()),
            ("launch", path.launch),
            ("return from waits", path.synchronisation),
        ):
            parts[name] = parts.get(name, 0) + spent
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _shares(rows: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in rows[:SHOWN] if share > 0)


def _time(nanoseconds: float) -> str:
    return duration(nanoseconds / 1e9)
