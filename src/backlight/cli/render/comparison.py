"""A comparison of two runs, as the terminal shows it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from backlight.analysis.ab_test import ABTest
from backlight.analysis.compare import Comparison
from backlight.cli.console import make_table
from backlight.monitors.steptime.model.step_comparison import TimeComparison


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print whether two runs can be compared, and if so their series side by side."""
    console.print(comparison.verdict, style="bold" if comparison.comparable else "bold red")
    for note in comparison.notes:
        console.print(f"  {note}")
    _print_sides(comparison, console)
    if not comparison.comparable:
        return
    if comparison.times is not None:
        print_times(comparison.times, console, comparison.times.basis)
    if comparison.kinds is not None:
        _print_rows(comparison.kinds, console, "by kind of operation, traced steps")
    table = make_table(
        "over common steps", "steps", "median", "median", "ratio", "last", "last", "differ from"
    )
    for track in comparison.tracks:
        differs = "never" if track.first_difference is None else f"step {track.first_difference}"
        numbers = (*map(_number, track.medians), _number(track.ratio), *map(_number, track.last))
        table.add_row(track.name, str(track.common), *numbers, differs)
    console.print(table)
    if comparison.parameters:
        table = make_table("parameters that differ most", "median", "median", "ratio")
        for shift in comparison.parameters:
            name = f"{shift.column} {shift.parameter}"
            table.add_row(name, _number(shift.first), _number(shift.second), _number(shift.ratio))
        console.print(table)


def print_times(times: TimeComparison, console: Console, basis: str) -> None:
    """Print step times side by side, the step first, then its phases, and what the intervals rest on."""
    console.print(times.verdict)
    if times.rows:
        _print_rows(times, console, "median")
        console.print(f"  {basis}")


def _print_rows(times: TimeComparison, console: Console, title: str) -> None:
    for trouble in times.trouble:
        console.print(f"  {trouble}")
    table = make_table(title, "A ms", "B ms", "B÷A", f"{times.confidence:.0%} interval", "", left=("",))
    for row in times.rows:
        ratio, _, interval = row.text.partition(" ")
        style = "bold" if row.found else "" if row.text else "dim"
        table.add_row(
            row.name.replace("_", " "), f"{row.first_ms:.2f}", f"{row.second_ms:.2f}",
            ratio, interval.strip("()"), Text(row.verdict, style=style),
        )  # fmt: skip
    console.print(table)


def print_ab_test(result: ABTest, console: Console) -> None:
    """Print the difference of two interleaved commands."""
    for name, command in zip("AB", result.commands, strict=True):
        console.print(f"{name}: {command}")
    for remark in result.remarks:
        console.print(f"  {remark}")
    print_times(result.times, console, f"intervals from {result.rounds} pairs of interleaved runs")


def _print_sides(comparison: Comparison, console: Console) -> None:
    table = make_table("run", "status", "steps", "last loss", "clipped")
    for side in (comparison.first, comparison.second):
        clipped = "not measured" if side.clipped_share is None else f"{side.clipped_share:.0%} of steps"
        table.add_row(side.path, side.status, str(side.steps), _number(side.last_loss), clipped)
    console.print(table)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
