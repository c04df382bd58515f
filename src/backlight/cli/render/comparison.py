"""A comparison of runs, as the terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from backlight.analysis.ab_test import ABTest
from backlight.analysis.compare import Comparison, FindingRow
from backlight.analysis.side_by_side import Row
from backlight.cli.console import make_table
from backlight.monitors.steptime.model.step_comparison import TimeComparison, TimeRow
from backlight.records import Severity
from backlight.text import count, duration, number, visible

SHOWN = 5
"""Rows of parameters and of findings that are printed without ``--full``."""

FIRST_COLUMN = 16
"""Characters that names of the configuration have at least, also next to many runs."""


def print_comparison(comparison: Comparison, console: Console, *, full: bool = False) -> None:
    """Print runs side by side: configurations, series, step times, findings; all rows with ``full``."""
    letters = [side.letter for side in comparison.runs]
    for side in comparison.runs:
        took = "" if side.seconds is None else f", took {duration(side.seconds)}"
        words = f"  {visible(side.status)}, {count(side.steps, 'step')}{took}"
        console.print(Text.assemble((side.letter, "bold"), f"  {visible(side.path)}", (words, "dim")))
    console.print(Text(visible(comparison.headline), "bold"))
    for note in comparison.notes:
        console.print(f"  {visible(note)}")
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
        _print_series("series", comparison.rows, letters, console, full=full)
        if comparison.steps is not None:
            first, last = comparison.steps
            console.print(
                f"  medians over steps {first:,} to {last:,}, the last quarter of the common ones",
                style="dim",
            )
    differing = [row for row in comparison.parameters if full or not row.is_equal]
    if differing:
        console.print()
        title = "parameters that differ most"
        _print_series(title, differing if full else differing[:SHOWN], letters, console, full=full)
    console.print()
    if len(comparison.times) == 1:
        print_times(comparison.times[0], console, full=full)
    else:
        _print_steps(comparison.times, console)
    if comparison.kinds is not None:
        _print_rows(comparison.kinds, console, "kind of operation", full=full)
    _print_findings(comparison.findings, letters, console, full=full)


def _print_series(
    title: str, rows: Sequence[Row], letters: Sequence[str], console: Console, *, full: bool
) -> None:
    """Print rows that are not equal; the others are counted."""
    pair = len(letters) == 2
    shown = [row for row in rows if full or not row.is_equal]
    if shown:
        table = make_table(title, *letters, *(["B÷A"] if pair else []))
        for row in shown:
            ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
            table.add_row(visible(row.name), *row.texts, *([ratio] if pair else []))
        console.print(table)
    if len(shown) < len(rows):
        hidden = count(len(rows) - len(shown), "equal row")
        head = "  " if shown else f"{title}: "
        console.print(f"{head}{hidden} hidden; --full prints all", style="dim")


def print_times(times: TimeComparison, console: Console, basis: str = "", *, full: bool = True) -> None:
    """Print step times side by side, the step first, then its phases, and what the intervals rest on."""
    console.print(times.verdict, style="bold")
    if times.rows:
        step, (one, other) = times.rows[0], times.names
        rates = (f"{number(1e3 / ms)} steps/s" for ms in (step.first_ms, step.second_ms))
        console.print(
            "  " + ", ".join(f"{name} {rate}" for name, rate in zip((one, other), rates, strict=True))
        )
        _print_rows(times, console, "median time", full=full)
        console.print(f"  {basis or times.basis}", style="dim")


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


def _print_rows(times: TimeComparison, console: Console, title: str, *, full: bool) -> None:
    for trouble in times.trouble:
        console.print(f"  {trouble}")
    one, other = times.names
    table = make_table(title, f"{one} ms", f"{other} ms", f"{other}÷{one}", "interval", "", left=("",))
    shown = [row for place, row in enumerate(times.rows) if full or row.found or not place]
    for row in shown:
        table.add_row(*_time_cells(row, times.rows[0]))
    console.print(table)
    if len(shown) < len(times.rows):
        hidden = count(len(times.rows) - len(shown), "undecided row")
        console.print(f"  {hidden} hidden; --full prints all", style="dim")


def _time_cells(row: TimeRow, step: TimeRow) -> tuple[str | Text, ...]:
    ratio, _, interval = row.text.partition(" ")
    name = visible(row.name.replace("_", " "))
    times = (_milliseconds(ms, step) for ms in (row.first_ms, row.second_ms))
    return name, *times, ratio, interval.strip("()"), Text(row.verdict, style="bold" if row.found else "dim")


def _milliseconds(ms: float, step: TimeRow) -> str:
    """Return a time with the decimals that suit the step."""
    return f"{ms:.{3 if step.first_ms < 10 else 2}f}"


def _print_findings(
    found: Sequence[FindingRow], letters: Sequence[str], console: Console, *, full: bool
) -> None:
    console.print()
    if not found:
        console.print("No findings in any of the runs.")
        return
    shared = [row for row in found if len(row.present) == len(letters)]
    apart = [row for row in found if row not in shared]
    shown = found if full else [row for row in apart if row.severity is not Severity.INFO][:SHOWN]
    if shown:
        table = make_table("only in", "severity", "finding", left=("severity",), folded=("finding",))
        for row in shown:
            table.add_row(_only_in(row), row.severity.value, visible(row.title))
        console.print(table)
    if not full:
        rest = len(apart) - len(shown)
        parts = [f"{count(len(shared), 'finding')} in all runs"] if shared else []
        parts += [f"{rest:,} more in some"] if rest else []
        if parts:
            console.print(f"  {', '.join(parts)}; --full prints all", style="dim")


def _only_in(row: FindingRow) -> str:
    unknown = f" ({', '.join(row.unknown)} not checked)" if row.unknown else ""
    return f"{', '.join(row.present)}{unknown}"


def print_ab_test(result: ABTest, console: Console) -> None:
    """Print the difference of two interleaved commands."""
    for name, command in zip("AB", result.commands, strict=True):
        console.print(f"{name}: {command}")
    for remark in result.remarks:
        console.print(f"  {remark}")
    basis = f"{100 * result.times.confidence:.0f} % intervals from {result.rounds} pairs of interleaved runs"
    print_times(result.times, console, basis)
