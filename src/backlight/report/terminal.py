"""Findings and the verdict over a run in a terminal, for widths of 60 columns and more.

Everything from a run is printed as plain text: neither rich markup nor an escape sequence in a name
has any effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from backlight.records import Finding, Severity
from backlight.report.source import Source
from backlight.report.text import count, listed, visible
from backlight.report.verdict import Outcome, by_severity, measurements, outcome, where
from backlight.store.reader import Run

ALIKE = 3
"""Findings of one rule that are printed in full; the rest of them is counted."""

_STYLES = {
    Severity.ERROR: ("✕", "error", "bold red"),
    Severity.WARNING: ("!", "warning", "bold yellow"),
    Severity.INFO: ("i", "note", "bold cyan"),
}
_TONES = {"error": "red", "warning": "yellow", "info": "cyan", "clear": "green", "unmeasured": "bold"}


def print_findings(run: Run, findings: Sequence[Finding], console: Console) -> None:
    """Print the verdict over ``run``, then its findings, worst first, then what was not measured."""
    _print(outcome(Source(run, tuple(findings))), run, findings, console)


def print_summary(
    run: Run, findings: Sequence[Finding], console: Console, *, report: Path | None = None
) -> None:
    """Print what :func:`print_findings` does, and last where the report is."""
    print_findings(run, findings, console)
    if report is not None:
        console.print(Text.assemble(("Report  ", "bold"), visible(report)), soft_wrap=True)


def _print(said: Outcome, run: Run, findings: Sequence[Finding], console: Console) -> None:
    glyph = {"error": "✕", "warning": "!", "info": "i", "clear": "✓"}.get(said.tone, "?")
    head = Text.assemble((f"{glyph} {said.headline}", f"bold {_TONES[said.tone]}"))
    name = visible(run.name) or "unnamed run"
    console.print(Text.assemble((name, "bold"), f"  {run.status.value}  ", (said.status, "dim")))
    console.print(head, Text(said.detail), sep="  ")
    for loss in said.losses:
        console.print(Text(f"Lost: {loss}", "yellow"))
    console.print()
    for _, alike in groupby(_together(findings), key=lambda f: (f.severity, f.rule)):
        same = list(alike)
        whole = same if len(same) <= ALIKE + 1 else same[:ALIKE]
        for finding in whole:
            _print_finding(finding, console)
        if len(whole) < len(same):
            rest = count(len(same) - len(whole), "more finding")
            console.print(Text(f"  and {rest} of {visible(same[0].rule)}; --json prints all of them.", "dim"))
            console.print()
    _print_unmeasured(said, console)


def _together(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, worst first, those of one rule next to each other."""
    ordered = by_severity(findings)
    first: dict[tuple[Severity, str], int] = {}
    for place, finding in enumerate(ordered):
        first.setdefault((finding.severity, finding.rule), place)
    return sorted(ordered, key=lambda finding: first[finding.severity, finding.rule])


def _print_finding(finding: Finding, console: Console) -> None:
    glyph, word, style = _STYLES[finding.severity]
    head = Text.assemble((f"{glyph} {word}", style), ("  " + visible(finding.rule).replace("_", " "), "dim"))
    rows = Table.grid(padding=(0, 1), expand=False)
    rows.add_column(width=9, style="dim", no_wrap=True)
    rows.add_column(overflow="fold", ratio=1)
    place = "  ".join(
        value if label in {"parameter", "module"} else f"{label} {value}" for label, value in where(finding)
    )
    if place:
        rows.add_row("where", Text(place))
    for path, step, value in measurements(finding)[:ALIKE]:
        at = f" at step {step}" if step else ""
        rows.add_row("evidence", Text.assemble(path, (f"{at}{' = ' if value else ''}{value}", "bold")))
    rows.add_row("check", Text(visible(finding.next_check)))
    if finding.overridden:
        changed = ", ".join(f"{visible(name)} = {value:g}" for name, value in finding.overridden.items())
        rows.add_row("override", Text(changed))
    console.print(head)
    console.print(Padding(Text(visible(finding.claim), "bold", overflow="fold"), (0, 0, 0, 2)))
    console.print(Padding(rows, (0, 0, 0, 2)))
    console.print()


def _print_unmeasured(said: Outcome, console: Console) -> None:
    if not said.unmeasured:
        return
    rows = Table.grid(padding=(0, 1), expand=False)
    rows.add_column(overflow="fold", max_width=24)
    rows.add_column(overflow="fold", ratio=1)
    for item in said.unmeasured:
        names = f": {listed(item.names)}" if item.names else ""
        rows.add_row(Text(item.what), Text(f"{item.reason}{names}"))
    console.print(Text("Not measured", "bold"))
    console.print(Padding(rows, (0, 0, 1, 2)))
