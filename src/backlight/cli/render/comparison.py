"""A comparison of two runs, as the terminal shows it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from backlight.analysis.ab_test import ABTest
from backlight.analysis.compare import Comparison
from backlight.cli.console import make_console
from backlight.monitors.steptime.model.step_comparison import TimeComparison


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print whether two runs can be compared, and if so their series side by side."""
    console.print(Text(comparison.verdict, style="bold" if comparison.comparable else "bold red"))
    for note in comparison.notes:
        console.print(Text(f"  {note}"))
    _print_sides(comparison, console)
    if not comparison.comparable:
        return
    if comparison.times is not None:
        print_times(comparison.times, console)
    if comparison.kinds is not None:
        _print_rows(comparison.kinds, console, "by kind of operation, traced steps")
    table = _table("over common steps", "steps", "median", "median", "ratio", "last", "last", "differ from")
    for track in comparison.tracks:
        differs = "never" if track.first_difference is None else f"step {track.first_difference}"
        numbers = (*map(_number, track.medians), _number(track.ratio), *map(_number, track.last))
        table.add_row(Text(track.name), str(track.common), *numbers, differs)
    console.print(table)
    if comparison.parameters:
        table = _table("parameters that differ most", "median", "median", "ratio")
        for shift in comparison.parameters:
            name = Text(f"{shift.column} {shift.parameter}")
            table.add_row(name, _number(shift.first), _number(shift.second), _number(shift.ratio))
        console.print(table)


def print_times(times: TimeComparison, console: Console, counted: str = "steady steps") -> None:
    """Print step times side by side, the step first, then its phases."""
    console.print(Text(times.verdict))
    if times.rows:
        _print_rows(times, console, counted)


def _print_rows(times: TimeComparison, console: Console, counted: str) -> None:
    for trouble in times.trouble:
        console.print(Text(f"  {trouble}"))
    first, second = times.counts
    table = _table(f"{counted} {first} and {second}", "median ms", "median ms", "difference")
    for row in times.rows:
        style = "bold" if row.found else ""
        table.add_row(
            Text(row.name.replace("_", " ")),
            f"{row.first_ms:.2f}", f"{row.second_ms:.2f}", Text(row.text, style=style),
        )  # fmt: skip
    console.print(table)


def print_ab_test(result: ABTest, console: Console) -> None:
    """Print the difference of two interleaved commands."""
    for name, command in zip("AB", result.commands, strict=True):
        console.print(Text(f"{name}: {command}"))
    for remark in result.remarks:
        console.print(Text(f"  {remark}"))
    print_times(result.times, console, "runs")


class Turns(AbstractContextManager["Turns"]):
    """A progress bar on standard error, quiet where that is no terminal."""

    def __init__(self, *, quiet: bool = False, what: str = "run") -> None:
        console = make_console(stderr=True)
        self._what = what
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Turns:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the bar away."""
        self._bar.stop()

    def __call__(self, done: int, of: int) -> None:
        """Show how many are done."""
        self._bar.update(
            self._task, completed=done, total=of, description=f"{self._what} {min(done + 1, of)} of {of}"
        )


def _print_sides(comparison: Comparison, console: Console) -> None:
    table = _table("run", "status", "steps", "last loss", "clipped")
    for side in (comparison.first, comparison.second):
        clipped = "not measured" if side.clipped_share is None else f"{side.clipped_share:.0%} of steps"
        table.add_row(Text(side.path), side.status, str(side.steps), _number(side.last_loss), clipped)
    console.print(table)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
