"""An analysis of traces, as the terminal shows it and as a page that is written."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backlight import atomic_files
from backlight.cli.console import Page, make_table
from backlight.cli.render.trace_details import detail_tables, ms
from backlight.terminal import make_console
from backlight.text import listed, percent, scaled
from backlight.trace.analysis import Analysis, RankAnalysis, StepRow
from backlight.trace.classification import distinct_names, short
from backlight.trace.operators import Row
from backlight.trace.ranks import Ranks, stragglers
from backlight.trace.utilization import Idle
from backlight.trace.verdict import CAUSES, facts, verdict

_PAGE_WIDTH = 150

GROUPS = 4
"""Process groups whose steps are printed; --json has them all."""


def print_analysis(analysis: Analysis, console: Console, top: int, *, full: bool = True) -> None:
    """Print of every rank what limits it, then at most ten lines, or the tables; then the ranks together."""
    page = Page(console)
    for one in analysis.traces:
        rank = "" if one.rank is None else f"rank {one.rank}: "
        page.summary(f"{rank}{verdict(one)}", () if full else facts(one))
        if full:
            _print_source(one, page)
        for note in one.notes:
            page.note(note)
        if full:
            _print_tables(one, console, top)
    if not full:
        page.more()
    if analysis.ranks is not None:
        _print_ranks(analysis.ranks, page, console, top, full=full)


def save_page(analysis: Analysis, path: Path, top: int) -> None:
    """Write what is printed as HTML or Markdown, by the suffix of ``path``.

    Raises
    ------
    ValueError
        If the suffix is neither.
    """
    if path.suffix not in {".html", ".md"}:
        raise ValueError(
            f"{path}: expected a file that ends in .html or .md, got {path.suffix or 'no suffix'!r}"
        )
    console = make_console(
        record=True, width=_PAGE_WIDTH, file=io.StringIO(), force_terminal=path.suffix == ".html"
    )
    print_analysis(analysis, console, top)
    if path.suffix == ".html":
        text = console.export_html(inline_styles=True)
    else:
        text = f"# Trace\n\n```text\n{console.export_text()}```\n"
    atomic_files.write(path, text.encode())


def _print_source(one: RankAnalysis, page: Page) -> None:
    devices = (f"{name or 'device'} ({number})" for number, name in one.devices.items())
    page.say(one.path)
    page.sentence(f"{one.events:,} events, {', '.join(devices) or 'no device'}")


def _print_tables(one: RankAnalysis, console: Console, top: int) -> None:
    console.print(_steps(one.steps, top))
    if any(row.device is not None for row in one.steps):
        console.print(_idle(one.usual_steps))
    console.print(_critical(one.usual_steps))
    where = "device" if one.device_total else "host"
    console.print(_rows("phase", one.phases, top, where, calls="host calls"))
    console.print(_rows("kind of operation", one.kinds, top, where))
    console.print(_rows("operator", one.operators, top, where, phase=True))
    if one.kernels:
        console.print(_kernels(one.kernels, top))
    if one.transfers:
        console.print(_transfers(one, top))
    if one.copies:
        console.print(_copies(one, top))
    if one.pairs:
        console.print(_pairs(one, top))
    for table in detail_tables(one, top):
        console.print(table)
    console.print()


def _part(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _steps(steps: Sequence[StepRow], top: int) -> Table:
    table = make_table("step", "ms", "busy", "idle", "compute", "communicate", "exposed")
    for row in steps[:top]:
        name = "whole trace" if row.number is None else str(row.number)
        table.add_row(name, *_step_cells(row))
    if len(steps) > top:
        table.add_row(f"... {len(steps) - top} more", *[""] * 6)
    if len(steps) > 2:
        middle = np.median([row.duration for row in steps])
        table.add_row("median", ms(float(middle)), *[""] * 5)
    return table


def _step_cells(row: StepRow) -> list[str]:
    if row.device is None:
        return [ms(row.duration), "not measured", *["-"] * 4]
    return [
        ms(row.duration),
        _part(row.busy, row.duration),
        _part(row.idle.total, row.duration),
        _part(row.overlap.computation, row.duration),
        _part(row.overlap.communication, row.duration),
        _part(row.overlap.exposed, row.duration),
    ]


def _idle(steps: Sequence[StepRow]) -> Table:
    table = make_table("the device is idle because of", "ms", "of all steps")
    length = sum(row.duration for row in steps)
    for field in fields(Idle):
        spent = sum(getattr(row.idle, field.name) for row in steps)
        if spent:
            table.add_row(
                f"{field.name.replace('_', '-')}: {CAUSES[field.name]}", ms(spent), _part(spent, length)
            )
    return table


def _critical(steps: Sequence[StepRow]) -> Table:
    parts: Counter[str] = Counter()
    for row in {id(row.critical_path): row for row in steps}.values():
        parts.update({f"host: {name}": spent for name, spent in row.critical_path.host.items()})
        parts.update({f"device: {name}": spent for name, spent in row.critical_path.device.items()})
        parts["launch"] += row.critical_path.launch
        parts["return from synchronisation"] += row.critical_path.synchronisation
    total = sum(parts.values())
    table = make_table("critical path of the steps", "ms", "share")
    for name, spent in parts.most_common():
        if spent:
            table.add_row(name, ms(spent), _part(spent, total))
    return table


def _rows(
    title: str, rows: Sequence[Row], top: int, where: str, *, phase: bool = False, calls: str = "calls"
) -> Table:
    extra = ["phase"] if phase else []
    table = make_table(title, *extra, calls, "host ms", "device ms", f"of {where}")
    for row in rows[:top]:
        cells = [row.phase] if phase else []
        numbers = (f"{row.calls:,}", ms(row.host), ms(row.device), f"{row.share:.1%}")
        table.add_row(short(row.name), *cells, *numbers)
    _add_rest(table, rows, top, len(extra) + 3)
    return table


def _kernels(rows: Sequence[Row], top: int) -> Table:
    table = make_table("kernel", "calls", "ms", "of device", "min us", "max us", "sigma")
    names = distinct_names(row.name for row in rows)
    for row in rows[:top]:
        spread = (f"{value / 1e3:,.1f}" for value in (row.shortest, row.longest, row.deviation))
        table.add_row(names[row.name], f"{row.calls:,}", ms(row.device), f"{row.share:.1%}", *spread)
    if len(rows) > top:
        rest = sum(row.share for row in rows[top:])
        table.add_row(Text(f"... {len(rows) - top} more"), "", "", f"{rest:.1%}", "", "", "")
    return table


def _add_rest(table: Table, rows: Sequence[Row], top: int, between: int) -> None:
    if len(rows) > top:
        rest = sum(row.share for row in rows[top:])
        table.add_row(Text(f"... {len(rows) - top} more"), *[""] * between, f"{rest:.1%}")


def _transfers(one: RankAnalysis, top: int) -> Table:
    table = make_table("copies by the device", "calls", "MB", "ms")
    for row in one.transfers[:top]:
        size = "not recorded" if row.bytes is None else f"{row.bytes / 1e6:,.1f}"
        table.add_row(row.name, f"{row.calls:,}", size, ms(row.device))
    return table


def _copies(one: RankAnalysis, top: int) -> Table:
    device = bool(one.device_total)
    where = "device ms" if device else "host ms"
    table = make_table(
        "copies by type", "layout", "calls", "elements", where, "share", "line", named=("line",)
    )
    layouts = {None: "-", True: "same", False: "differs"}
    for row in one.copies[:top]:
        types = " -> ".join(dict.fromkeys(name.removeprefix("c10::") for name in (row.source, row.target)))
        line = re.sub(r" \([^)]*\)", "", row.line.rpartition("/")[2])
        elements = "-" if row.elements is None else scaled(row.elements, "").strip()
        table.add_row(
            types or "not recorded", layouts[row.contiguous], f"{row.calls:,}", elements,
            ms(row.device if device else row.host), f"{row.share:.1%}", line or "-",
        )  # fmt: skip
    return table


def _pairs(one: RankAnalysis, top: int) -> Table:
    device = bool(one.device_total)
    where = "device" if device else "host"
    table = make_table(f"operator / its backward, {where} ms", "calls", "forward", "backward", "ratio")
    for row in one.pairs[:top]:
        ahead = row.forward_device if device else row.forward_host
        behind = row.backward_device if device else row.backward_host
        ratio = f"{behind / ahead:.1f}" if ahead else "-"
        name = f"{short(row.forward)} / {short(row.backward)}"
        table.add_row(name, f"{row.calls:,}", ms(ahead), ms(behind), ratio)
    return table


def _print_ranks(ranks: Ranks, page: Page, console: Console, top: int, *, full: bool) -> None:
    size = "" if ranks.world_size is None else f" of {ranks.world_size}"
    page.sentence((f"{len(ranks.given)}{size} ranks", "bold"))
    for note in ranks.notes:
        page.note(note)
    if not ranks.steps:
        return
    late = stragglers(ranks)
    for one in late[: GROUPS if full else 0]:
        shown = one.group[:8]
        table = make_table("waited in collectives, ms", *(f"rank {rank}" for rank in shown), "last", "by ms")
        for step in [step for step in ranks.steps if step.group == one.group][:top]:
            waits = (ms(step.waited[rank]) for rank in shown)
            table.add_row(f"step {step.step}", *waits, f"rank {step.last}", ms(step.delay))
        console.print(table)
    for one in late:
        group = "" if len(late) == 1 else f"group of ranks {listed(list(map(str, one.group)), 8)}: "
        often = f"comes last in {one.count} of {one.steps} steps, by {percent(one.delay)} of a step"
        page.sentence(f"{group}rank {one.rank} {often}")
    page.sentence(f"{ranks.collectives:,} common collectives, clocks {ranks.clocks}")
