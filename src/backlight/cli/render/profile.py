"""A profile in print: what limits the step and the facts behind it, or tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from backlight.cli.console import Page, make_table
from backlight.diagnose.profile.verdict import FACTS, facts, line_name, verdict
from backlight.terminal import make_console
from backlight.text import duration, percent

if TYPE_CHECKING:
    from backlight.diagnose.profile.result import ProfileResult
    from backlight.records import Finding

MODULES, OPERATORS, LINES = 12, 5, 8
"""Modules, operators of a phase, and copies that are printed; --json has them all."""

TREE = 24
"""Modules of the tree that are printed."""

SMALL = 0.01
"""Share of a phase from which an operator is printed, and of a step from which a module is."""


def show(result: ProfileResult, findings: Sequence[Finding] = (), *, full: bool = False) -> None:
    """Print what limits the step, then at most ten lines or all tables with the findings in full."""
    page = Page()
    page.sentence((verdict(result), "bold"))
    if result.rank == 0:
        if full:
            _tables(result)
        for control in result.controls:
            page.sentence((control.text, "bold" if control.outcome == "confirmed" else ""))
        claims = [f"{finding.label}: {finding.title}" for finding in findings]
        for line in [] if full else [*claims, *facts(result)][:FACTS]:
            page.sentence(f"  {line}", indent=4)
        for finding in findings if full else ():
            page.sentence((f"{finding.label}: ", "bold"), finding.title)
            page.note(finding.fix, "  fix")
            page.sentence(("  refuted if ", "dim"), finding.refuted_if)
    _notes(result, page, full=full)
    if not full and result.rank == 0:
        page.more(before="the script")


def _tables(result: ProfileResult) -> None:
    for table in (_phases, _lines, _modules, _operators, _kinds, _copies, _optimizations):
        table(result)


def _notes(result: ProfileResult, page: Page, *, full: bool) -> None:
    if full and result.device_phases:
        page.note("times of phases are of the host, which runs ahead of the device; --json has device_phases")
    if full and result.sampling is not None:
        page.note(
            f"lines are from {result.sampling.samples} samples of the training thread, which cost "
            f"{percent(result.sampling.cost)} of a core; longest time without one "
            f"{duration(result.sampling.longest_gap_ms / 1e3)}"
        )
    if full and result.tracing_overhead is not None:
        page.note(
            f"traced steps took {result.tracing_overhead:.2f} times as long as clocked ones; "
            "times of steps and phases are from the clocked ones"
        )
    for trouble in result.not_measured:
        page.note(f"not measured: {trouble}")
    for text in result.trace_notes if full else ():
        page.note(text)
    if full and result.mfu_basis is not None:
        page.note(f"MFU{'' if result.mfu is not None else ' not measured'}: {result.mfu_basis}")
    if result.trace is not None:
        page.say(("trace: ", "dim"), result.trace, " (chrome://tracing, ui.perfetto.dev)")
    if result.exit_code:
        page.note(f"the script ended with exit code {result.exit_code}")


def _phases(result: ProfileResult) -> None:
    table = make_table("phase", "median ms", "p95 ms", "MAD ms", "share")
    for name, phase in result.phases.items():
        table.add_row(
            name.replace("_", " "),
            f"{phase.median_ms:.2f}", f"{phase.p95_ms:.2f}", f"{phase.mad_ms:.2f}", f"{phase.share:.1%}",
        )  # fmt: skip
    for one in result.optimizers:
        name = f"optimizer {one.number}: {one.type}"
        table.add_row(name, f"{one.median_ms:.2f}", "", "", f"{one.share:.1%}")
    _print(table)
    where = "host" if result.device is None else "device"
    table = make_table(f"optimizer, {where}, traced steps", "steps", "median ms", "p95 ms", "max ms")
    for row in result.traced_optimizers:
        times = (f"{time:.2f}" for time in (row.median_ms, row.p95_ms, row.max_ms))
        table.add_row(row.type, str(row.steps), *times)
    _print(table)


def _lines(result: ProfileResult) -> None:
    table = make_table("line", "phase", "samples", "ms", "of phase", left=("phase",))
    for row in (result.lines or ())[:MODULES]:
        table.add_row(
            line_name(row), row.phase.replace("_", " "), str(row.samples), f"{row.ms:.2f}", percent(row.share)
        )
    _print(table)


def _modules(result: ProfileResult) -> None:
    if result.module_tree is not None:
        table = make_table("module, clocked steps", "total ms", "self ms", "of step")
        shown = [row for row in result.module_tree if row.share >= SMALL]
        for row in shown[:TREE]:
            name = f"{'  ' * row.depth}{row.name or '(model)'}"
            table.add_row(name, f"{row.total_ms:.2f}", f"{row.self_ms:.2f}", f"{row.share:.1%}")
        _add_rest(table, len(result.module_tree) - len(shown[:TREE]))
        _print(table)
    table = make_table("module, traced", "calls", "fwd ms", "self", "bwd ms", "self", "recomputed")
    chosen = sorted(result.modules or (), key=lambda m: -(m.forward_exclusive_ms + m.backward_exclusive_ms))
    for module in chosen[:MODULES]:
        table.add_row(
            module.name or "(model)",
            f"{module.calls:g}", f"{module.forward_ms:.2f}", f"{module.forward_exclusive_ms:.2f}",
            f"{module.backward_ms:.2f}", f"{module.backward_exclusive_ms:.2f}",
            f"{module.recomputed_ms:.2f}" if module.recomputed_ms else "",
        )  # fmt: skip
    _add_rest(table, len(chosen) - MODULES)
    _print(table)


def _add_rest(table: Table, more: int) -> None:
    if more > 0:
        table.add_row(Text(f"{more} more", style="dim"), *[""] * (len(table.columns) - 1))


def _operators(result: ProfileResult) -> None:
    device = result.device is not None
    table = make_table(
        "operator", "phase", "calls", "device ms" if device else "self ms", "of phase", left=("phase",)
    )
    for phase in result.traced_phases or ():
        rows = [row for row in result.operators or () if row.phase == phase and row.share >= SMALL]
        for row in rows[:OPERATORS]:
            spent = row.device_ms if device else row.host_ms
            calls = f"{row.calls:g}" if row.calls else ""
            table.add_row(_short(row.name), phase, calls, f"{spent:.2f}", f"{row.share:.0%}")
    _print(table)


def _kinds(result: ProfileResult) -> None:
    device = result.device is not None
    table = make_table("kind of operation", "calls", "device ms" if device else "self ms", "share")
    for row in result.kinds or ():
        if row.share >= SMALL:
            spent = row.device_ms if device else row.host_ms
            table.add_row(row.name, f"{row.calls:g}", f"{spent:.2f}", f"{row.share:.0%}")
    _print(table)


def _copies(result: ProfileResult) -> None:
    device = result.device is not None
    table = make_table(
        "copy", "layout", "calls", "elements", "ms", "of step", "line", left=("layout",), named=("line",)
    )
    for row in (result.copies or ())[:LINES]:
        if row.share < SMALL:
            break
        layout = {None: "", True: "same", False: "differs"}[row.contiguous]
        types = f"{row.source} -> {row.target}" if row.source else "types not recorded"
        elements = "" if row.elements is None else f"{row.elements:,.0f}"
        spent = row.device_ms if device else row.host_ms
        table.add_row(
            types, layout, f"{row.calls:g}", elements, f"{spent:.2f}", f"{row.share:.0%}",
            row.line or "not recorded",
        )  # fmt: skip
    _print(table)


def _optimizations(result: ProfileResult) -> None:
    page = Page()
    for row in result.optimizations:
        page.sentence((f"{row.name}: ", "dim"), f"{row.state}, {row.detail}")
    if result.optimizations:
        page.say("")


def _print(table: Table) -> None:
    if table.row_count:
        make_console().print(table)
        make_console().print()


def _short(name: str, width: int = 48) -> str:
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return name if len(name) <= width else name[: width - 1] + "…"
