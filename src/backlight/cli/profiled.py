"""A profile in print: one line for the step, tables for phases and modules, or one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from backlight.cli.explained import Page

if TYPE_CHECKING:
    from backlight.session.profiling import Profile

SHOWN = 12
"""Modules that are printed; --json has them all."""


def show(profile: Profile) -> None:
    """Print a profile."""
    page = Page()
    page.say((headline(profile), "bold"))
    _phases(profile)
    _modules(profile)
    if profile.overhead is not None:
        page.say(
            ("note: ", "dim"), f"traced steps took {profile.overhead:.2f} times as long as clocked ones; "
            "times of steps and phases are from the clocked ones"
        )  # fmt: skip
    for trouble in (*profile.trouble, profile.steps.steady.trouble):
        if trouble:
            page.say(("note: ", "dim"), trouble)
    if profile.throughput is not None:
        what = "MFU: " if profile.throughput.mfu is not None else "MFU not measured: "
        page.say(("note: ", "dim"), what + profile.throughput.basis)
    if profile.trace_path is not None:
        page.say(("trace: ", "dim"), str(profile.trace_path), " (chrome://tracing, ui.perfetto.dev)")
    if profile.code:
        page.say(("note: ", "dim"), f"the script ended with exit code {profile.code}")


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
            line += f"; MFU {reached.mfu:.0%}"
    return line


def as_object(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON types; what was not measured is null."""
    steps = profile.steps
    reached = profile.throughput
    return {
        "exit_code": profile.code,
        "step": None
        if steps.step is None
        else {
            "median_ms": steps.step.median * 1e3,
            "low_ms": steps.step.low * 1e3,
            "high_ms": steps.step.high * 1e3,
            "p95_ms": steps.step.p95 * 1e3,
            "mad_ms": steps.step.mad * 1e3,
            "steps": steps.step.count,
        },
        "first_ms": steps.steady.first * 1e3,
        "warmup_dropped": steps.steady.warmup,
        "phases": {
            phase.name: {
                "median_ms": phase.median_ms,
                "p95_ms": phase.p95_ms,
                "mad_ms": phase.mad_ms,
                "share": phase.share,
            }
            for phase in steps.phases
        },
        "sum_error": steps.sum_error,
        "parameters": profile.parameters,
        "tokens_per_second": None if reached is None else reached.tokens_per_second,
        "mfu": None if reached is None else reached.mfu,
        "mfu_basis": None if reached is None else reached.basis,
        "modules": None
        if profile.modules is None
        else [
            {
                "name": module.name,
                "calls": module.calls,
                "forward_ms": module.forward * 1e3,
                "forward_exclusive_ms": module.forward_exclusive * 1e3,
                "recomputed_ms": module.recomputed * 1e3,
                "backward_ms": module.backward * 1e3,
                "backward_exclusive_ms": module.backward_exclusive * 1e3,
            }
            for module in profile.modules.modules
        ],
        "backward_unattributed_ms": None if profile.modules is None else profile.modules.unattributed * 1e3,
        "tracing_overhead": profile.overhead,
        "trace": None if profile.trace_path is None else str(profile.trace_path),
        "not_measured": [text for text in (*profile.trouble, steps.steady.trouble) if text],
    }


def _phases(profile: Profile) -> None:
    table = _table("phase", "median ms", "p95 ms", "MAD ms", "share")
    for phase in profile.steps.phases:
        table.add_row(
            Text(phase.name.replace("_", " ")),
            f"{phase.median_ms:.2f}", f"{phase.p95_ms:.2f}", f"{phase.mad_ms:.2f}", f"{phase.share:.1%}",
        )  # fmt: skip
    if table.row_count:
        Console().print(table)


def _modules(profile: Profile) -> None:
    if profile.modules is None:
        return
    table = _table("module", "calls", "forward ms", "own", "backward ms", "own", "recomputed")
    chosen = sorted(profile.modules.modules, key=lambda m: -(m.forward_exclusive + m.backward_exclusive))
    for module in chosen[:SHOWN]:
        table.add_row(
            Text(module.name or "(model)"),
            f"{module.calls:g}", f"{module.forward * 1e3:.2f}", f"{module.forward_exclusive * 1e3:.2f}",
            f"{module.backward * 1e3:.2f}", f"{module.backward_exclusive * 1e3:.2f}",
            f"{module.recomputed * 1e3:.2f}" if module.recomputed else "",
        )  # fmt: skip
    Console().print(table)
    if len(chosen) > SHOWN:
        Page().say(("note: ", "dim"), f"{len(chosen) - SHOWN} more modules in --json")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _thousands(number: float) -> str:
    return f"{number / 1e3:.0f}k" if number >= 1e4 else f"{number:.0f}"
