"""Details of a trace as tables: annotations, launches, streams, sequences, rates, and a difference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from backlight.cli.console import make_table
from backlight.text import number
from backlight.trace.classification import short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from backlight.trace.analysis import RankAnalysis
    from backlight.trace.trace_diff import DiffRow, TraceDiff


def ms(nanoseconds: float) -> str:
    """Return nanoseconds as milliseconds."""
    value = nanoseconds / 1e6
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:,.1f}"


def detail_tables(one: RankAnalysis, top: int) -> Iterator[Table]:
    """Yield the tables that a trace has data for."""
    makers = (
        _annotations, _launches, _streams, _sequences, _operator_rates, _copy_rates, _collective_rates,
        _counters,
    )  # fmt: skip
    for make in makers:
        table = make(one, top)
        if table.row_count:
            yield table


def _annotations(one: RankAnalysis, top: int) -> Table:
    table = make_table("user annotation", "calls", "host ms", "device ms", "share", "ms per step", "p95")
    for row in one.annotations[:top]:
        spread = row.device_per_step or row.host_per_step
        per_step = (ms(spread.median), ms(spread.p95)) if spread is not None else ("-", "-")
        table.add_row(row.name, f"{row.calls:,}", ms(row.host), ms(row.device), f"{row.share:.1%}", *per_step)
    return table


def _launches(one: RankAnalysis, top: int) -> Table:
    table = make_table("launches, us", "calls", "call", "p95", "delay", "p95", "max", "kernel shorter")
    for row in one.launches[:top]:
        spread = (row.call.median, row.call.p95, row.delay.median, row.delay.p95, row.delay.max)
        table.add_row(row.name, f"{row.calls:,}", *map(_us, spread), f"{row.short / row.calls:.0%}")
    return table


def _streams(one: RankAnalysis, top: int) -> Table:
    table = make_table("device, stream", "events", "busy ms", "queue", "longest", "full ms", "mostly")
    for row in one.streams[:top]:
        table.add_row(
            f"{row.device}, {row.stream}", f"{row.events:,}", ms(row.busy), f"{row.mean:.1f}",
            f"{row.longest:,}", ms(row.full), next(iter(row.kinds), "-"),
        )  # fmt: skip
    return table


def _sequences(one: RankAnalysis, top: int) -> Table:
    table = make_table("kernels that repeat in this order", "times", "ms", "of device")
    for row in one.sequences[:top]:
        kernels = [short(name, 24) for name in row.kernels[:4]]
        rest = f" and {len(row.kernels) - 4} more" if len(row.kernels) > 4 else ""
        share = f"{row.device / one.device_total:.1%}" if one.device_total else "-"
        table.add_row(f"{' > '.join(kernels)}{rest}", f"{row.count:,}", ms(row.device), share)
    return table


def _operator_rates(one: RankAnalysis, top: int) -> Table:
    table = make_table("operator and shapes", "calls", "device ms", "TFLOP/s", "TB/s")
    for row in one.operator_rates[:top]:
        rates = ("-" if rate is None else f"{rate:.3g}" for rate in (row.tflops, row.tbytes))
        shapes = (sides.replace(", ", "x") for sides in re.findall(r"\[(\d[\d, ]*)\]", row.shapes))
        table.add_row(" ".join((short(row.name), *shapes)), f"{row.calls:,}", ms(row.device), *rates)
    return table


def _copy_rates(one: RankAnalysis, top: int) -> Table:
    table = make_table("bandwidth of copies, GB/s", "calls", "MB", "min", "mean", "max")
    for row in one.copy_rates[:top]:
        rates = (f"{rate:.3g}" for rate in (row.min, row.mean, row.max))
        table.add_row(row.name, f"{row.calls:,}", f"{row.bytes / 1e6:,.1f}", *rates)
    return table


def _collective_rates(one: RankAnalysis, top: int) -> Table:
    table = make_table("collective", "ranks", "MB", "calls", "median ms", "bus GB/s")
    for row in one.collective_rates[:top]:
        table.add_row(
            row.name,
            str(row.ranks),
            number(row.bytes / 1e6, 3),
            f"{row.calls:,}",
            ms(row.median),
            f"{row.bus:.3g}",
        )
    return table


def _counters(one: RankAnalysis, top: int) -> Table:
    table = make_table("operator, hardware counter", "kernels", "sum")
    for row in one.hardware_counters[:top]:
        for name, value in sorted(row.counters.items(), key=lambda item: -item[1])[:3]:
            if not value:
                continue
            table.add_row(f"{short(row.operator)}, {name}", f"{row.kernels:,}", f"{value:,.4g}")
    return table


def print_diff(found: TraceDiff, console: Console, top: int) -> None:
    """Print a difference: one line, then what changed most."""
    first, second = found.total
    step = found.step[1] / found.step[0] - 1 if found.step[0] else 0.0
    console.print(
        f"step {ms(found.step[0])} ms to {ms(found.step[1])} ms ({100 * step:+.1f} %)", style="bold"
    )
    change = f"{'+' if second > first else ''}{ms(second - first)}"
    console.print(f"{found.where} per step {ms(first)} ms to {ms(second)} ms ({change} ms)")
    console.print(f"A: {found.paths[0]}\nB: {found.paths[1]}", soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", style="dim")
    for title, rows in (("kind", found.kinds), ("operator", found.operators), ("kernel", found.kernels)):
        if rows:
            console.print(_diff_table(title, rows, top))


def _diff_table(title: str, rows: Sequence[DiffRow], top: int) -> Table:
    table = make_table(f"{title}, per step", "phase", "calls A", "calls B", "A ms", "B ms", "B - A")
    for row in rows[:top]:
        calls = (f"{calls:,.4g}" for calls in row.calls)
        table.add_row(short(row.name), row.phase, *calls, *map(ms, row.time), ms(row.change))
    if len(rows) > top:
        table.add_row(f"... {len(rows) - top} more", *[""] * 5, ms(sum(row.change for row in rows[top:])))
    return table
