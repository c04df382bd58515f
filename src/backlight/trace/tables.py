"""Tables of traces; times are milliseconds, made of nanoseconds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from operator import itemgetter
from typing import Any

from backlight.answer import Column, Table, share, word
from backlight.text import number, scaled
from backlight.trace.analysis import RankAnalysis, TracedStep
from backlight.trace.classification import LAYOUTS, distinct_names, short
from backlight.trace.device_peaks import peak_of
from backlight.trace.ranks import Group, Lateness, Ranks
from backlight.trace.trace_diff import TraceDiff
from backlight.trace.utilization import Idle

SEQUENCE = 4
"""Kernels that a sequence of them is named by."""

COUNTERS = 3
"""Hardware counters of an operator that are listed."""

MAX_RANKS = 8
"""Ranks whose waits have a column."""

CAUSES = {
    "host_bound": "the next kernel was not launched yet",
    "synchronisation": "the host had waited for the device",
    "data": "the host waited for a DataLoader",
    "communication": "the host waited for a collective",
    "launch_gap": "launch latency",
    "queued": "launched work waited for another stream or rank",
    "unknown": "for a reason that the trace does not show",
}


def ms(nanoseconds: float) -> str:
    """Return nanoseconds as milliseconds."""
    value = nanoseconds / 1e6
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:,.1f}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def _rate(value: float) -> str:
    return f"{value:.3g}"


CALLS = Column("calls", "calls")


def rank_tables(rank: RankAnalysis) -> list[Table]:
    """Return the tables of one trace that have rows; of several traces each is named by its rank."""
    return [table for table in (*_use(rank), *_costs(rank), *_device(rank), *_rates(rank)) if table.rows]


def _use(rank: RankAnalysis) -> Iterator[Table]:
    def part(title: str, of: Callable[[TracedStep], int]) -> Column:
        def value(row: TracedStep) -> float | None:
            return None if row.device is None or not row.duration else of(row) / row.duration

        return Column(title, value, share)

    devices = [f"{name or 'device'} ({number})" for number, name in rank.devices.items()]
    yield Table(
        (
            word("step", lambda row: "whole trace" if row.number is None else str(row.number)),
            Column("ms", "duration", ms), part("busy", lambda row: row.busy),
            part("idle", lambda row: row.idle.total), part("compute", lambda row: row.overlap.computation),
            part("communicate", lambda row: row.overlap.communication),
            part("exposed", lambda row: row.overlap.exposed),
        ),
        rank.steps, notes=(f"{rank.path}: {rank.events:,} events, {', '.join(devices) or 'no device'}",),
    )  # fmt: skip
    length = sum(row.duration for row in rank.usual_steps) or 1
    yield _parts("the device is idle because of", "of all steps", idle_spent(rank), length, _cause)
    path = critical_path(rank)
    yield _parts("critical path of the steps", "share", path, sum(path.values()) or 1)


def _parts(
    title: str, share_title: str, parts: dict[str, int], whole: int, name: Callable[[str], str] = str
) -> Table:
    """Return a table of parts of a whole."""
    return Table(
        (
            word(title, lambda row: name(row[0])), Column("ms", itemgetter(1), ms),
            Column(share_title, lambda row: row[1] / whole, share),
        ),
        list(parts.items()), brief=20,
    )  # fmt: skip


def _cause(name: str) -> str:
    return f"{name.replace('_', '-')}: {CAUSES[name]}"


def idle_spent(analysis: RankAnalysis) -> dict[str, int]:
    """Return the idle nanoseconds of the usual steps by cause, the largest first."""
    spent = {f.name: sum(getattr(row.idle, f.name) for row in analysis.usual_steps) for f in fields(Idle)}
    return {name: ns for name, ns in sorted(spent.items(), key=lambda item: -item[1]) if ns}


def critical_path(analysis: RankAnalysis) -> dict[str, int]:
    """Return the nanoseconds of the parts of the critical path of the usual steps, the largest first."""
    parts: Counter[str] = Counter()
    for path in {id(row.critical_path): row.critical_path for row in analysis.usual_steps}.values():
        parts.update({f"host {name}": ns for name, ns in path.host.items()})
        parts.update({f"device {name}": ns for name, ns in path.device.items()})
        parts.update({"launch": path.launch, "return from waits": path.synchronisation})
    return {name: spent for name, spent in parts.most_common() if spent}


def _costs(analysis: RankAnalysis) -> Iterator[Table]:
    where = "device" if analysis.device_total else "host"
    spent = (
        Column("host ms", "host", ms), Column("device ms", "device", ms),
        Column(f"of {where}", "share", share, adds=True),
    )  # fmt: skip
    name = word("operator", lambda row: short(row.name))
    yield Table((word("phase", "name"), Column("host calls", "calls"), *spent), analysis.phases)
    yield Table((word("kind of operation", "name"), CALLS, *spent), analysis.kinds)
    yield Table((name, word("phase", "phase"), CALLS, *spent), analysis.operators)
    module = word("module", lambda row: short(row.name))
    yield Table((module, word("phase", "phase"), CALLS, *spent), analysis.modules)
    names = distinct_names(row.name for row in analysis.kernels)
    yield Table(
        (
            word("kernel", lambda row: names[row.name]), CALLS, Column("ms", "device", ms),
            Column("of device", "share", share, adds=True), Column("min us", "shortest", _us),
            Column("max us", "longest", _us), Column("sigma", "deviation", _us),
        ),
        analysis.kernels,
    )  # fmt: skip
    yield Table(
        (
            word("copies by the device", "name"), CALLS, Column("MB", "bytes", _megabytes),
            Column("ms", "device", ms),
        ),
        analysis.transfers,
    )  # fmt: skip
    yield Table(
        (
            word("copies by type", _types), word("layout", lambda row: LAYOUTS[row.contiguous]), CALLS,
            Column("elements", "elements", lambda value: scaled(value, "").strip()),
            Column(f"{where} ms", where, ms), Column("share", "share", share),
            word("line", lambda row: re.sub(r" \([^)]*\)", "", row.line.rpartition("/")[2]) or "-", "name"),
        ),
        analysis.copies,
    )  # fmt: skip
    ahead, behind = f"forward_{where}", f"backward_{where}"
    yield Table(
        (
            word(
                f"operator / its backward, {where} ms",
                lambda row: f"{short(row.forward)} / {short(row.backward)}",
            ),
            CALLS, Column("forward", ahead, ms), Column("backward", behind, ms),
            Column("ratio", lambda row: getattr(row, behind) / (getattr(row, ahead) or math.nan), _rate),
        ),
        analysis.pairs,
    )  # fmt: skip
    yield Table(
        (
            word("user annotation", "name"), CALLS, Column("host ms", "host", ms),
            Column("device ms", "device", ms), Column("share", "share", share),
            Column("ms per step", lambda row: _spread(row, "median"), ms),
            Column("p95", lambda row: _spread(row, "p95"), ms),
        ),
        analysis.annotations,
    )  # fmt: skip


def _types(row: Any) -> str:
    types = dict.fromkeys(name.removeprefix("c10::") for name in (row.source, row.target))
    return " -> ".join(types) or "not recorded"


def _spread(row: Any, which: str) -> int | None:
    spread = row.device_per_step or row.host_per_step
    return None if spread is None else int(getattr(spread, which))


def _device(analysis: RankAnalysis) -> Iterator[Table]:
    yield Table(
        (
            word("launches, us", "name"), CALLS, Column("call", lambda row: row.call.median, _us),
            Column("p95", lambda row: row.call.p95, _us), Column("delay", lambda row: row.delay.median, _us),
            Column("p95", lambda row: row.delay.p95, _us), Column("max", lambda row: row.delay.max, _us),
            Column("kernel shorter", lambda row: row.short / row.calls, lambda value: f"{value:.0%}"),
        ),
        analysis.launches,
    )  # fmt: skip
    yield Table(
        (
            word("device, stream", lambda row: f"{row.device}, {row.stream}"), Column("events", "events"),
            Column("busy ms", "busy", ms), Column("queue", "mean", lambda value: f"{value:.1f}"),
            Column("longest", "longest"), Column("full ms", "full", ms),
            word("mostly", lambda row: next(iter(row.kinds), "-")),
        ),
        analysis.streams,
    )  # fmt: skip
    yield Table(
        (
            word("kernels that repeat in this order", _sequence), Column("times", "count"),
            Column("ms", "device", ms),
            Column("of device", lambda row: row.device / (analysis.device_total or math.nan), share),
        ),
        analysis.sequences,
    )  # fmt: skip


def _sequence(row: Any) -> str:
    rest = len(row.kernels) - SEQUENCE
    names = " > ".join(short(name, 24) for name in row.kernels[:SEQUENCE])
    return f"{names} and {rest} more" if rest > 0 else names


def _peak_notes(analysis: RankAnalysis) -> tuple[str, ...]:
    """Return the peaks that rates are shares of."""
    names = set(analysis.devices.values())
    peak = peak_of(next(iter(names))) if len(names) == 1 else None
    if peak is None:
        return ()
    memory = "" if peak.bandwidth is None else f" and {peak.bandwidth / 1e12:.3g} TB/s"
    sheet = f"{peak.flops / 1e12:,.0f} TFLOP/s dense in bf16 or fp16{memory}"
    return (f"peak of {next(iter(names))} by its data sheet: {sheet}; limit: what the larger share is of",)


def _sized(row: Any) -> str:
    batch = f"{row.batch} times " if row.batch > 1 else ""
    return f"{batch}{row.m}x{row.n}x{row.k} {row.types}"


def _rates(analysis: RankAnalysis) -> Iterator[Table]:
    reached: tuple[Column, ...] = (Column("TFLOP/s", "tflops", _rate), Column("TB/s", "tbytes", _rate))
    if any(row.of_peak is not None for row in analysis.operator_rates):
        reached = (*reached, Column("of peak", "of_peak", share), word("limit", "limit"))
    yield Table(
        (
            word("operator and shapes", _shaped), CALLS, Column("device ms", "device", ms),
            *reached,
        ),
        analysis.operator_rates, notes=_peak_notes(analysis),
    )  # fmt: skip
    yield Table(
        (
            word("product MxNxK", _sized), CALLS, Column("device ms", "device", ms), *reached,
        ),
        analysis.gemms,
    )  # fmt: skip
    yield Table(
        (
            word("bandwidth of copies, GB/s", "name"), CALLS, Column("MB", "bytes", _megabytes),
            Column("min", "min", _rate), Column("mean", "mean", _rate), Column("max", "max", _rate),
        ),
        analysis.copy_rates,
    )  # fmt: skip
    yield Table(
        (
            word("collective", "name"), Column("ranks", "ranks"),
            Column("MB", "bytes", lambda nbytes: number(nbytes / 1e6, 3)), CALLS,
            Column("median ms", "median", ms), Column("bus GB/s", "bus", _rate),
        ),
        analysis.collective_rates,
    )  # fmt: skip
    yield Table(
        (
            word("operator, hardware counter", lambda row: f"{short(row[0].operator)}, {row[1]}"),
            Column("kernels", lambda row: row[0].kernels), Column("sum", itemgetter(2)),
        ),
        [
            (row, name, value)
            for row in analysis.hardware_counters
            for name, value in sorted(row.counters.items(), key=lambda item: -item[1])[:COUNTERS]
            if value
        ],
    )  # fmt: skip


def _shaped(row: Any) -> str:
    shapes = (sides.replace(", ", "x") for sides in re.findall(r"\[(\d[\d, ]*)\]", row.shapes))
    return " ".join((short(row.name), *shapes))


def waits(ranks: Ranks, group: Group) -> Table:
    """Return how long the ranks of a group waited in collectives, by step."""
    named = (Column(f"rank {rank}", partial(_waited, rank), ms) for rank in group[:MAX_RANKS])
    return Table(
        (
            word("waited in collectives, ms", lambda row: f"step {row.step}"), *named,
            word("last", lambda row: f"rank {row.last}"), Column("by ms", "delay", ms),
        ),
        [step for step in ranks.steps if step.group == group],
    )  # fmt: skip


def _waited(rank: int, step: Lateness) -> int:
    return step.waited[rank]


def diff_tables(difference: TraceDiff) -> list[Table]:
    """Return what changed between two traces, per step."""
    rows: dict[str, Sequence[Any]] = {
        "kind": difference.kinds, "module": difference.modules, "operator": difference.operators,
        "kernel": difference.kernels,
    }  # fmt: skip
    return [
        Table(
            (
                word(f"{title}, per step", lambda row: short(row.name)), word("phase", "phase"),
                Column("calls A", lambda row: row.calls[0]), Column("calls B", lambda row: row.calls[1]),
                Column("A ms", lambda row: row.time[0], ms), Column("B ms", lambda row: row.time[1], ms),
                Column("B - A", "change", ms, adds=True),
            ),
            listed,
        )
        for title, listed in rows.items()
        if listed
    ]  # fmt: skip
