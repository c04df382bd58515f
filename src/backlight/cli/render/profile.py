"""A profile in print: one line for the step, then tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from backlight.cli.console import Page
from backlight.diagnose.profile.document import short_line

if TYPE_CHECKING:
    from backlight.diagnose.profile.run import Profile
    from backlight.records import Finding
    from backlight.trace.step_operators import Operations

MODULES, OPERATORS, LINES = 12, 5, 8
"""Modules, operators of a phase, and copies that are printed; --json has them all."""

SMALL = 0.01
"""Share of a phase from which an operator is printed."""


def show(profile: Profile, findings: Sequence[Finding] = ()) -> None:
    """Print a profile, and what the rules say of it."""
    page = Page()
    page.say((headline(profile), "bold"))
    if profile.rank == 0:
        _phases(profile)
        _modules(profile)
        if profile.operations is not None:
            _operators(profile.operations)
            _kinds(profile.operations)
            _copies(profile.operations)
        _optimizations(profile)
        for control in profile.controls:
            page.say((control.says, "bold" if control.confirmed else ""))
        for finding in findings:
            page.say((f"{finding.severity}: ", "bold"), finding.title)
            page.say(("  fix: ", "dim"), finding.fix)
            page.say(("  refuted if ", "dim"), finding.refuted_if)
    _notes(profile, page)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Show how many runs of controls are done, on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("controls", total=None)
        yield lambda done, of: shown.update(task, completed=done, total=of)


def headline(profile: Profile) -> str:
    """Return the step in one line."""
    steps = profile.steps
    steady = steps.steady
    if steps.step is None:
        return f"step not measured: {steady.trouble} (first {_seconds(steady.first)})"
    half = (steps.step.high - steps.step.low) / 2 * 1e3
    parts = ", ".join(f"{p.name.replace('_', ' ')} {p.median_ms:.1f}" for p in steps.phases)
    line = (
        f"step {steps.step.median * 1e3:.1f} ms ± {half:.1f} ({steady.warmup} warm-up dropped; "
        f"first {_seconds(steady.first)}): {parts}"
    )
    reached = profile.throughput
    if reached is not None and reached.tokens_per_second is not None:
        line += f"; {_thousands(reached.tokens_per_second)} tokens/s"
        if reached.mfu is not None:
            line += f"; MFU {reached.mfu:.0%}" if reached.mfu >= 0.1 else f"; MFU {reached.mfu:.1%}"
    if profile.operations is not None and profile.operations.device is not None:
        line += f"; {profile.operations.device.statement}"
    return line


def _notes(profile: Profile, page: Page) -> None:
    def note(text: str) -> None:
        page.say(("note: ", "dim"), text)

    if profile.observed.device:
        note("times of phases are of the host, which runs ahead of the device; --json has device_phases")
    if profile.overhead is not None:
        note(
            f"traced steps took {profile.overhead:.2f} times as long as clocked ones; "
            "times of steps and phases are from the clocked ones"
        )
    for trouble in (*profile.trouble, profile.steps.steady.trouble):
        if trouble:
            note(f"not measured: {trouble}")
    for text in profile.operations.notes if profile.operations is not None else ():
        note(text)
    if profile.throughput is not None:
        note(
            ("MFU: " if profile.throughput.mfu is not None else "MFU not measured: ")
            + profile.throughput.basis
        )
    if profile.trace_path is not None:
        page.say(("trace: ", "dim"), str(profile.trace_path), " (chrome://tracing, ui.perfetto.dev)")
    if profile.code:
        note(f"the script ended with exit code {profile.code}")


def _phases(profile: Profile) -> None:
    table = _table("phase", "median ms", "p95 ms", "MAD ms", "share")
    for phase in profile.steps.phases:
        table.add_row(
            Text(phase.name.replace("_", " ")),
            f"{phase.median_ms:.2f}", f"{phase.p95_ms:.2f}", f"{phase.mad_ms:.2f}", f"{phase.share:.1%}",
        )  # fmt: skip
    _print(table)


def _modules(profile: Profile) -> None:
    if profile.modules is None:
        return
    table = _table("module", "calls", "forward ms", "own", "backward ms", "own", "recomputed")
    chosen = sorted(profile.modules.modules, key=lambda m: -(m.forward_exclusive + m.backward_exclusive))
    for module in chosen[:MODULES]:
        table.add_row(
            Text(module.name or "(model)"),
            f"{module.calls:g}", f"{module.forward * 1e3:.2f}", f"{module.forward_exclusive * 1e3:.2f}",
            f"{module.backward * 1e3:.2f}", f"{module.backward_exclusive * 1e3:.2f}",
            f"{module.recomputed * 1e3:.2f}" if module.recomputed else "",
        )  # fmt: skip
    if len(chosen) > MODULES:
        table.add_row(Text(f"{len(chosen) - MODULES} more", style="dim"), *[""] * 6)
    _print(table)


def _operators(tables: Operations) -> None:
    device = tables.device is not None
    table = _table("operator", "phase", "calls", "device ms" if device else "self ms", "of phase")
    for phase in tables.phases:
        rows = [row for row in tables.operators if row.phase == phase and row.share >= SMALL]
        for row in rows[:OPERATORS]:
            spent = row.device_ms if device else row.host_ms
            calls = f"{row.calls:g}" if row.calls else ""
            table.add_row(Text(_short(row.name)), phase, calls, f"{spent:.2f}", f"{row.share:.0%}")
    _print(table)


def _kinds(tables: Operations) -> None:
    device = tables.device is not None
    table = _table("kind of operation", "calls", "device ms" if device else "self ms", "share")
    for row in tables.kinds:
        if row.share >= SMALL:
            spent = row.device_ms if device else row.host_ms
            table.add_row(row.name, f"{row.calls:g}", f"{spent:.2f}", f"{row.share:.0%}")
    _print(table)


def _copies(tables: Operations) -> None:
    device = tables.device is not None
    table = _table("copy", "layout", "calls", "elements", "ms", "of step", "line")
    for row in tables.copies[:LINES]:
        if row.share < SMALL:
            break
        layout = {None: "", True: "alike", False: "differs"}[row.contiguous]
        types = f"{row.source} -> {row.target}" if row.source else "types not recorded"
        elements = "" if row.elements is None else f"{row.elements:,.0f}"
        spent = row.device_ms if device else row.host_ms
        table.add_row(
            Text(types), layout, f"{row.calls:g}", elements, f"{spent:.2f}", f"{row.share:.0%}",
            Text(short_line(row.line) or "not recorded"),
        )  # fmt: skip
    _print(table)


def _optimizations(profile: Profile) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("optimisation", "", "seen"):
        table.add_column(title)
    for row in profile.optimizations:
        table.add_row(row.name, row.state, Text(row.detail))
    _print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, overflow="fold")
    for name in others:
        right = name not in {"phase", "layout", "line"}
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def _print(table: Table) -> None:
    if table.row_count:
        Console().print(table)
        Console().print()


def _short(name: str, width: int = 48) -> str:
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return name if len(name) <= width else name[: width - 1] + "…"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _thousands(number: float) -> str:
    return f"{number / 1e3:.0f}k" if number >= 1e4 else f"{number:.0f}"
