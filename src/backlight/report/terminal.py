"""Findings and the verdict over a run in a terminal, for widths of 60 columns and more.

Everything from a run is printed as plain text: neither rich markup nor an escape sequence in a name
has any effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from backlight.findings.evaluate import findings_of
from backlight.records import Finding, Severity
from backlight.report.source import Source
from backlight.report.sparkline import evidence_line, outstanding, sparkline
from backlight.report.verdict import (
    PARTED,
    RunOutcome,
    describe_cost,
    explaining_command,
    hints_line,
    measurements,
    outcome,
    probing_command,
    where,
)
from backlight.store.errors import StoreError
from backlight.store.format.manifest import Progress
from backlight.store.read.run import Run, open_run
from backlight.terminal import make_console
from backlight.text import as_typed, count, listed, number, visible

ALIKE = 3
"""Findings of one rule that are printed in full; the rest of them is counted."""

EVIDENCE = 2
"""Measurements that are printed of one finding; the report shows all of them."""

BARS = 60
"""Columns of a sparkline."""

LABEL = 10
"""Columns for a label."""

_STYLES = {
    Severity.ERROR: ("✕", "bold red"),
    Severity.WARNING: ("!", "bold yellow"),
    Severity.INFO: ("i", "bold cyan"),
}
_TONES = {"error": "red", "warning": "yellow", "info": "cyan", "clear": "green", "unmeasured": "bold"}


def print_findings(
    run: Run, findings: Sequence[Finding], console: Console, *, full: bool = False, hints: bool = False
) -> RunOutcome:
    """Print the verdict over ``run``, then its findings, worst first, then what was not measured.

    With ``full`` every finding is printed, and the cost of watching; else only some of a rule, and the others
    are counted. With ``hints``, the hints take the place of the findings; else they are counted. Returns the
    verdict.
    """
    source = Source(run, tuple(findings))
    view = outcome(source)
    glyph = {"error": "✕", "warning": "!", "info": "i", "clear": "✓"}.get(view.tone, "?")
    console.print(Text(visible(run.name) or "unnamed run", "bold"))
    console.print(Text.assemble((f"{glyph} {view.tally}.", f"bold {_TONES[view.tone]}"), f" {view.detail}"))
    for parts in ((view.state, view.status), view.about):
        if line := PARTED.join(part for part in parts if part):
            console.print(Text(line, "dim"))
    for facts in view.lines:
        console.print(Text(visible(facts.text)))
    for loss in view.losses:
        console.print(Text(f"Lost: {loss}", "yellow"))
    console.print()
    shown = source.hints if hints else source.findings
    for _, alike in groupby(_together(shown), key=lambda f: (f.severity, f.rule)):
        same = list(alike)
        whole = same if full or len(same) <= ALIKE + 1 else same[:ALIKE]
        for finding in whole:
            _print_finding(finding, source, console)
        if len(whole) < len(same):
            rest = count(len(same) - len(whole), "more finding")
            console.print(Text(f"  and {rest} of {visible(same[0].rule)}; --full prints all of them.", "dim"))
            console.print()
    for withdrawal in view.withdrawn:
        _print_row("", Text(withdrawal.text, "dim"), console)
    if view.withdrawn:
        console.print()
    _print_unmeasured(view, console)
    if not hints and (line := hints_line(source)):
        console.print(Text(line, "dim"))
        console.print()
    if full and (cost := describe_cost(source)):
        console.print(Text("Time in backlight", "bold"))
        _print_row("", Text(cost), console)
        console.print()
    return view


def summary_text(path: Path, fresh: Sequence[Finding] | None = None, progress: Progress | None = None) -> str:
    """Return what is printed after the run in ``path``: its findings, and what to type next.

    ``fresh`` are findings that were just made, None to evaluate the rules; ``progress`` is as for
    :func:`backlight.store.read.run.open_run`.
    """
    console = make_console(stderr=True)
    with console.capture() as captured:
        try:
            run = open_run(path, progress)
            view = print_findings(run, findings_of(run, fresh=fresh), console)
            for line in view.checked:
                console.print(f"checked {line}", soft_wrap=True, markup=False)
            if probe := probing_command(run, view):
                console.print(f"to look further: {probe}", soft_wrap=True, markup=False)
            next_command = explaining_command(run) or f"backlight report {as_typed(path)}"
            console.print(f"next: {next_command}", soft_wrap=True, markup=False)
        except StoreError as error:
            console.print(f"backlight: {error}")
    return captured.get()


def _together(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings in order, those of one rule next to each other."""
    first: dict[tuple[Severity, str], int] = {}
    for place, finding in enumerate(findings):
        first.setdefault((finding.severity, finding.rule), place)
    return sorted(findings, key=lambda finding: first[finding.severity, finding.rule])


def _print_finding(finding: Finding, source: Source, console: Console) -> None:
    glyph, style = _STYLES[finding.severity]
    rule = visible(finding.rule).replace("_", " ")
    console.print(Text.assemble((f"{glyph} {finding.label}", style), (f"  {rule}", "dim")))
    _print_row("", Text(visible(finding.title), "bold"), console)
    _print_row("", Text(visible(finding.detail)), console)
    _print_row("fix", Text(visible(finding.fix)), console)
    # Scalars alone: a series of a parameter takes too long to read after each run.
    if line := evidence_line(((evidence, None) for evidence in finding.evidence), source):
        width = min(BARS, console.width - 2 - LABEL)
        values = outstanding(np.array(line["values"], dtype=np.float64), width)
        _print_row("series", Text(sparkline(values, width)), console)
    place = [v if label in {"parameter", "module"} else f"{label} {v}" for label, v in where(finding)]
    if place:
        _print_row("where", Text("  ".join(place)), console)
    for path, step, value in measurements(finding)[:EVIDENCE]:
        at = f" at step {step}" if step else ""
        _print_row("evidence", Text.assemble(path, (f"{at}{' = ' if value else ''}{value}", "bold")), console)
    if finding.overridden:
        changed = ", ".join(
            f"{visible(name)} = {number(value)}" for name, value in finding.overridden.items()
        )
        _print_row("override", Text(changed), console)
    console.print()


def _print_unmeasured(result: RunOutcome, console: Console) -> None:
    if not result.unmeasured:
        return
    console.print(Text("Not measured", "bold"))
    for item in result.unmeasured:
        names = f" ({listed(item.names)})" if item.names else ""
        _print_row("", Text.assemble((item.what, "bold"), f": {item.reason}{names}"), console)
    console.print()


def _print_row(label: str, text: Text, console: Console) -> None:
    """Print ``text`` behind a label, wrapped and indented to it, without blanks at the ends of lines."""
    indent = 2 + (LABEL if label else 0)
    for place, line in enumerate(text.wrap(console, max(20, console.width - indent), overflow="fold")):
        line.rstrip()
        head = f"  {label:<{LABEL}}" if label and place == 0 else " " * indent
        console.print(Text.assemble((head, "dim"), line), no_wrap=True, overflow="ignore")
