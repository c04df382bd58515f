"""Answer of ``trace``: what limits the steps, the facts behind it, and the tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backlight.answer import Answer, Table
from backlight.text import duration, listed, percent
from backlight.trace.analysis import Analysis, RankAnalysis, exposed_communication, idle_causes, idle_share
from backlight.trace.classification import Kind, short
from backlight.trace.ranks import Ranks, stragglers
from backlight.trace.step_limits import Limit, limit_of
from backlight.trace.tables import CAUSES, critical_path, diff_tables, idle_spent, ms, rank_tables, waits
from backlight.trace.trace_diff import TraceDiff

KIND_SHARE = 0.2
"""Share of the host's time from which a kind of operation is named."""

SHOWN = 3
"""Kinds, operators and parts of the path that a line names."""

GROUPS = 4
"""Process groups whose steps have a table; --json has them all."""


def answer(analysis: Analysis) -> Answer:
    """Return the answer of one or several traces: what limits each rank, then the ranks together."""
    several = len(analysis.traces) > 1
    facts: list[str] = []
    tables: list[Table] = []
    notes: list[str] = []
    verdicts = []
    for trace in analysis.traces:
        rank = "" if trace.rank is None else f"rank {trace.rank}: "
        verdicts.append(f"{rank}{_verdict(trace)}")
        named = rank if several else ""
        facts += [f"{named}{line}" for line in _facts(trace)]
        notes += [f"{named}{note}" for note in trace.notes]
        tables += [_named(table, named) for table in rank_tables(trace)]
    ranks = analysis.ranks
    if ranks is None:
        return Answer(verdicts[0], analysis, tuple(facts), tuple(tables), tuple(notes))
    late, *together = _together(ranks)
    if ranks.steps:
        tables += [waits(ranks, straggler.group) for straggler in stragglers(ranks)[:GROUPS]]
    return Answer(late, analysis, (*verdicts, *together, *facts), tuple(tables), (*ranks.notes, *notes))


def _named(table: Table, prefix: str) -> Table:
    first, *rest = table.columns
    return replace(table, columns=(replace(first, title=f"{prefix}{first.title}"), *rest))


def _together(ranks: Ranks) -> list[str]:
    """Return a line on each group of ranks: which of them comes last; and on what is compared."""
    size = "" if ranks.world_size is None else f" of {ranks.world_size}"
    lines = [f"{len(ranks.given)}{size} ranks"]
    if not ranks.steps:
        return lines
    late = stragglers(ranks)
    for slow in late:
        group = "" if len(late) == 1 else f"group of ranks {listed(list(map(str, slow.group)), 8)}: "
        often = f"comes last in {slow.count} of {slow.steps} steps, by {percent(slow.delay)} of a step"
        lines.append(f"{group}rank {slow.rank} {often}")
    lines[:2] = ["; ".join(lines[:2])]
    return [*lines, f"{ranks.collectives:,} common collectives, clocks {ranks.clocks}"]


def diff_answer(difference: TraceDiff) -> Answer:
    """Return the answer of two traces: how the step changed, and what changed most."""
    step = difference.step[1] / difference.step[0] - 1 if difference.step[0] else 0.0
    first, second = difference.total
    change = f"{'+' if second > first else ''}{ms(second - first)}"
    return Answer(
        f"step {ms(difference.step[0])} ms to {ms(difference.step[1])} ms ({100 * step:+.1f} %)",
        difference,
        (
            f"{difference.where} per step {ms(first)} ms to {ms(second)} ms ({change} ms)",
            f"A: {difference.paths[0]}",
            f"B: {difference.paths[1]}",
        ),
        tuple(diff_tables(difference)),
        difference.notes,
    )


def _verdict(rank: RankAnalysis) -> str:
    """Return what limits the steps, in one line."""
    lengths = _lengths(rank)
    what = f"{'step' if rank.steps[0].number is not None else 'trace of'} {_time(float(np.median(lengths)))}"
    idle, exposed = idle_share(rank), exposed_communication(rank) or 0.0
    if idle is None:
        phases = [row for row in rank.phases if row.share]
        where = f": mostly {phases[0].name} ({percent(phases[0].share)})" if len(phases) > 1 else ""
        kinds = [row for row in rank.kinds if row.name != Kind.OTHER and row.share >= KIND_SHARE]
        kind = f"; {kinds[0].name} takes {percent(kinds[0].share)} of the step" if kinds else ""
        return f"{what}, no device{where}{kind}"
    causes = idle_spent(rank)
    limit = limit_of(idle, idle_causes(rank), exposed)
    if limit is Limit.COMMUNICATION:
        return f"{what}, limited by communication: {percent(exposed)} of it with no computation"
    if limit is not Limit.DEVICE and causes:
        name, spent = next(iter(causes.items()))
        whole = sum(causes.values())
        part = percent(spent / whole)
        return f"{what}, device idle {percent(idle)}: mostly {CAUSES[name]} ({part} of the idle time)"
    top = rank.kinds[0]
    busy = f"limited by the device (busy {percent(1 - idle)})"
    return f"{what}, {busy}: {top.name} is {percent(top.share)} of its time"


def _facts(rank: RankAnalysis) -> list[str]:
    """Return the lines behind the verdict."""
    lengths = _lengths(rank)
    causes, path = idle_spent(rank), critical_path(rank)
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


def _shares(rows: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in rows[:SHOWN] if share > 0)


def _time(nanoseconds: float) -> str:
    return duration(nanoseconds / 1e9)
