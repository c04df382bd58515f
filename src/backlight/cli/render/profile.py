"""A profile in print: one line for the step, then tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from backlight.cli.console import Page, make_table
from backlight.terminal import make_console
from backlight.text import duration

if TYPE_CHECKING:
    from backlight.diagnose.profile.result import ProfileResult
    from backlight.records import Finding

MODULES, OPERATORS, LINES = 12, 5, 8
"""Modules, operators of a phase, and copies that are printed; --json has them all."""

SMALL = 0.01
"""Share of a phase from which an operator is printed."""


def show(result: ProfileResult, findings: Sequence[Finding] = ()) -> None:
    """Print a profile and its findings."""
    page = Page()
    page.say((headline(result), "bold"))
    if result.rank == 0:
        _phases(result)
        _modules(result)
        _operators(result)
        _kinds(result)
        _copies(result)
        _optimizations(result)
        for control in result.controls:
            page.say((control.text, "bold" if control.outcome == "confirmed" else ""))
        for finding in findings:
            page.say((f"{finding.severity}: ", "bold"), finding.title)
            page.note(finding.fix, "  fix")
            page.say(("  refuted if ", "dim"), finding.refuted_if)
    _notes(result, page)


def headline(result: ProfileResult) -> str:
    """Return the step in one line."""
    step = result.step
    if step is None:
        return f"step not measured: {result.not_measured[-1]} (first {duration(result.first_ms / 1e3)})"
    half = (step.high_ms - step.low_ms) / 2
    # Shares of the median step add up to it; medians of the phases do not.
    parts = ", ".join(
        f"{name.replace('_', ' ')} {p.share * step.median_ms:.1f}" for name, p in result.phases.items()
    )
    line = (
        f"step {step.median_ms:.1f} ms ± {half:.1f} ({result.warmup_dropped} warm-up dropped; "
        f"first {duration(result.first_ms / 1e3)}): {parts}"
    )
    if result.tokens_per_second is not None:
        rate = result.tokens_per_second
        line += f"; {rate / 1e3:.0f}k tokens/s" if rate >= 1e4 else f"; {rate:.0f} tokens/s"
        if result.mfu is not None:
            line += f"; MFU {result.mfu:.0%}" if result.mfu >= 0.1 else f"; MFU {result.mfu:.1%}"
    return f"{line}; {result.device.statement}" if result.device is not None else line


def _notes(result: ProfileResult, page: Page) -> None:
    if result.device_phases:
        page.note("times of phases are of the host, which runs ahead of the device; --json has device_phases")
    if result.tracing_overhead is not None:
        page.note(
            f"traced steps took {result.tracing_overhead:.2f} times as long as clocked ones; "
            "times of steps and phases are from the clocked ones"
        )
    for trouble in result.not_measured:
        page.note(f"not measured: {trouble}")
    for text in result.trace_notes:
        page.note(text)
    if result.mfu_basis is not None:
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
    _print(table)


def _modules(result: ProfileResult) -> None:
    table = make_table("module", "calls", "forward ms", "own", "backward ms", "own", "recomputed")
    chosen = sorted(result.modules or (), key=lambda m: -(m.forward_exclusive_ms + m.backward_exclusive_ms))
    for module in chosen[:MODULES]:
        table.add_row(
            module.name or "(model)",
            f"{module.calls:g}", f"{module.forward_ms:.2f}", f"{module.forward_exclusive_ms:.2f}",
            f"{module.backward_ms:.2f}", f"{module.backward_exclusive_ms:.2f}",
            f"{module.recomputed_ms:.2f}" if module.recomputed_ms else "",
        )  # fmt: skip
    if len(chosen) > MODULES:
        table.add_row(Text(f"{len(chosen) - MODULES} more", style="dim"), *[""] * 6)
    _print(table)


def _operators(result: ProfileResult) -> None:
    device = result.device is not None
    table = make_table(
        "operator", "phase", "calls", "device ms" if device else "self ms", "of phase", folded=("phase",)
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
        "copy", "layout", "calls", "elements", "ms", "of step", "line", folded=("layout", "line")
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
    table = make_table("optimization", "", "observed", folded=("", "observed"))
    for row in result.optimizations:
        table.add_row(row.name, row.state, row.detail)
    _print(table)


def _print(table: Table) -> None:
    if table.row_count:
        make_console().print(table)
        make_console().print()


def _short(name: str, width: int = 48) -> str:
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return name if len(name) <= width else name[: width - 1] + "…"
