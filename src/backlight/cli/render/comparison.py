"""A comparison of runs, as the terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from backlight.analysis.ab_test import ABTest
from backlight.analysis.compare import Comparison
from backlight.analysis.comparison_verdict import are_complete, facts, times_facts, verdict
from backlight.analysis.side_by_side import Row
from backlight.cli.console import Page, make_table
from backlight.monitors.steptime.model.step_comparison import TimeComparison, TimeRow
from backlight.text import count, duration, visible

FIRST_COLUMN = 16
"""Characters that names of the configuration have at least, also next to many runs."""


def print_comparison(comparison: Comparison, console: Console, *, full: bool = False) -> None:
    """Print what differs, then at most ten lines, or the configurations, series, times and findings."""
    page = Page()
    page.summary(verdict(comparison), () if full else facts(comparison))
    if not full:
        page.more()
        return
    letters = [side.letter for side in comparison.runs]
    for side in comparison.runs:
        took = "" if side.seconds is None else f", took {duration(side.seconds)}"
        words = f"  {visible(side.status)}, {count(side.steps, 'step')}{took}"
        console.print(Text.assemble((side.letter, "bold"), f"  {visible(side.path)}", (words, "dim")))
    for note in (comparison.headline, *comparison.notes):
        page.sentence(f"  {visible(note)}")
    if comparison.differences:
        console.print()
        table = make_table("configuration", *letters, folded=letters)
        first = min(FIRST_COLUMN, max(len("configuration"), *(len(d.name) for d in comparison.differences)))
        for column in table.columns[1:]:
            column.max_width = max(6, (console.width - first) // len(letters) - 2)
        for difference in comparison.differences:
            table.add_row(visible(difference.name), *map(visible, difference.values))
        console.print(table)
    if comparison.rows:
        console.print()
        _print_series("series", comparison.rows, letters, console)
        if comparison.steps is not None:
            first, last = comparison.steps
            console.print(
                f"  medians over steps {first:,} to {last:,}, the last quarter of the common ones",
                style="dim",
            )
    if comparison.parameters:
        console.print()
        _print_series("parameters that differ most", comparison.parameters, letters, console)
    console.print()
    if len(comparison.times) == 1:
        _print_times(comparison.times[0], console)
    else:
        _print_steps(comparison.times, console)
    if comparison.kinds is not None:
        _print_rows(comparison.kinds, console, "kind of operation")
    _print_findings(comparison, console)


def _print_series(title: str, rows: Sequence[Row], letters: Sequence[str], console: Console) -> None:
    pair = len(letters) == 2
    table = make_table(title, *letters, *(["B÷A"] if pair else []))
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(visible(row.name), *row.texts, *([ratio] if pair else []))
    console.print(table)


def _print_times(times: TimeComparison, console: Console) -> None:
    """Print step times side by side, the step first, then its phases, and what the intervals rest on."""
    if times.rows:
        _print_rows(times, console, "median time")
        Page().sentence(f"  {times.basis}")


def _print_steps(all_times: Sequence[TimeComparison], console: Console) -> None:
    """Print the step time of each run against the first; the phases are those of pairs."""
    tested = [times for times in all_times if times.rows]
    for line in dict.fromkeys(line for times in all_times for line in times.trouble):
        console.print(f"  {line}")
    if not tested:
        console.print("Step times are not compared.", style="bold")
        return
    interval = f"{100 * tested[0].confidence:.0f} % interval"
    table = make_table("median step", "ms", "÷A", interval, "", left=("",))
    first = tested[0].rows[0]
    table.add_row(tested[0].names[0], _milliseconds(first.first_ms, first))
    for times in tested:
        _, _, second, *rest = _time_cells(times.rows[0], first)
        table.add_row(times.names[1], second, *rest)
    console.print(table)
    for variation in dict.fromkeys(times.variation_text for times in tested):
        console.print(f"  {variation}", style="dim")


def _print_rows(times: TimeComparison, console: Console, title: str) -> None:
    for trouble in times.trouble:
        console.print(f"  {trouble}")
    one, other = times.names
    table = make_table(title, f"{one} ms", f"{other} ms", f"{other}÷{one}", "interval", "", left=("",))
    for row in times.rows:
        table.add_row(*_time_cells(row, times.rows[0]))
    console.print(table)


def _time_cells(row: TimeRow, step: TimeRow) -> tuple[str | Text, ...]:
    ratio, _, interval = row.text.partition(" ")
    times = (_milliseconds(ms, step) for ms in (row.first_ms, row.second_ms))
    name, style = visible(row.name.replace("_", " ")), "bold" if row.is_significant else "dim"
    return name, *times, ratio, interval.strip("()"), Text(row.verdict, style=style)


def _milliseconds(ms: float, step: TimeRow) -> str:
    """Return a time with the decimals that suit the step."""
    return f"{ms:.{3 if step.first_ms < 10 else 2}f}"


def _print_findings(comparison: Comparison, console: Console) -> None:
    console.print()
    found = comparison.findings
    if not found:
        of = "any of the runs" if are_complete(comparison) else "what was recorded"
        console.print(f"No findings in {of}.")
        return
    table = make_table("in", "severity", "finding", left=("severity",), folded=("finding",))
    for row in found:
        unknown = f" ({', '.join(row.unknown)} not checked)" if row.unknown else ""
        table.add_row(f"{', '.join(row.present)}{unknown}", row.severity.value, visible(row.title))
    console.print(table)


def print_ab_test(result: ABTest, console: Console, *, full: bool = False) -> None:
    """Print the difference of two interleaved commands, then at most ten lines or the phases as well."""
    page = Page()
    basis = f"{100 * result.times.confidence:.0f} % intervals from {result.rounds} pairs of interleaved runs"
    named = [f"{name}: {command}" for name, command in zip("AB", result.commands, strict=True)]
    page.summary(result.times.verdict, [*named, *times_facts(result.times, basis), *result.remarks])
    if full and result.times.rows:
        _print_rows(result.times, console, "median time")
    if not full:
        page.more()
