"""Prints diagnoses of grokking and overlaid runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from backlight.analysis.overlay import Overlaid, value_at
from backlight.cli.console import Page, make_table
from backlight.monitors.grokking.model.analysis import GrokkingAnalysis, following_table
from backlight.text import duration, number, size, visible

if TYPE_CHECKING:
    from backlight.experiments.cost import Estimate

NAME = 20
"""Characters of the name of a run for which columns of values are left out."""

_VALUE = 11
"""Characters of a column of values, its padding included."""

_STYLES = {"grokking": "bold green", "unstable": "bold yellow", "threshold-artefact": "bold yellow",
           "insufficient-data": "bold yellow"}  # fmt: skip
_MARKS = {True: ("holds", "green"), False: ("fails", "red"), None: ("not known", "yellow")}


def print_examined(found: GrokkingAnalysis, console: Console) -> None:
    """Print one run: verdict, times, conditions, sweep, control, and what follows the test accuracy."""
    detection = found.detection
    facts = [found.facts.experiment, found.facts.control and f"control: {found.facts.control}"]
    console.print(Text.assemble(
        (visible(found.run.location), "bold"), (f"  {visible(', '.join(t for t in facts if t))}", "dim")
    ), soft_wrap=True)  # fmt: skip
    console.print(f"  {detection.words}", style=_STYLES.get(detection.verdict, "bold"))
    console.print(f"  {detection.claim}")
    if detection.conditions:
        columns = ("expected", "got", "")
        table = make_table("condition", *columns, folded=columns)
        for condition in detection.conditions:
            word, style = _MARKS[condition.held]
            cells = (condition.name, condition.expected, condition.got)
            table.add_row(*cells, Text(word, style))
        console.print(table)
    if detection.sweep:
        held = sum(point.grokking for point in detection.sweep)
        lines = [p.train_accuracy for p in detection.sweep], [p.test_share for p in detection.sweep]
        console.print(
            f"  Sweep: grokking at {held} of {len(detection.sweep)} lines, training accuracy "
            f"{min(lines[0]):.3g} to {max(lines[0]):.3g}, {min(lines[1]):.3g} to {max(lines[1]):.3g} of "
            "the way to the plateau."
        )
    if found.changes is None:
        console.print("  Change points: not measured; pip install 'backlight[research]'.", style="dim")
    elif found.changes:
        shown = ", ".join(number(step) for step in found.changes[:8])
        console.print(f"  Change points of the test accuracy: step {shown}.")
    for note in detection.notes:
        console.print(f"  {visible(note)}.", style="dim")
    _print_control(found, console)
    if not found.facts.control:  # its test accuracy is noise, which nothing can follow
        _print_following(found, console)
    console.print()


def _print_control(found: GrokkingAnalysis, console: Console) -> None:
    if found.facts.control:
        return
    if found.control is None or found.control_detection is None:
        console.print(
            "  No matched control was found: no measure can be attributed to grokking. "
            "Run the same with --control random-labels.",
            style="yellow" if found.detection.verdict == "grokking" else "dim",
        )
        return
    theirs = found.control_detection
    console.print(f"  Control {visible(found.control.path.name)}: {theirs.words}. {theirs.claim}")


def _print_following(found: GrokkingAnalysis, console: Console) -> None:
    if not found.following:
        return
    Page(console).table(following_table(found))
    explained = "corr.: rank correlation with the test accuracy after memorisation; lead in steps"
    if found.controls:
        explained += (
            "; control: how far the measure of the controls moves with it, as a share; q: false-discovery "
            "rate at which the two differ"
        )
    console.print(f"  {explained}.", style="dim")
    if found.controls:
        console.print(f"  {found.signals()}")


def print_overlaid(overlaid: Overlaid, console: Console) -> None:
    """Print the runs with their verdicts, then each measure at a few steps, run by run."""
    columns = ("experiment", "control", "verdict", "memorised", "generalised")
    table = make_table("run", *columns, folded=columns)
    for name, (_, facts, detection) in overlaid.runs.items():
        times = (
            ("", "", "")
            if detection is None
            else (detection.words, *(str(t or "") for t in (detection.memorised, detection.generalised)))
        )
        cells = (name, facts.experiment, facts.control, times[0] or "not evaluated", *times[1:])
        table.add_row(*map(visible, cells))
    console.print(table)
    for name in overlaid.left_out:
        console.print(f"  {visible(name)} never generalised and cannot be aligned.", style="yellow")
    for reason in overlaid.reasons.values():
        console.print(f"  {visible(reason)}.", style="yellow")
    if overlaid.aligned:
        console.print("  Steps count from the generalisation of each run.", style="dim")
    named = max((len(name) for name in overlaid.measures), default=0)
    runs = min(NAME, max((len(name) for name in overlaid.runs), default=0))
    chosen = _spread(overlaid.table_steps(), (console.width - named - runs - 4) // _VALUE)
    heads = [f"{step:+,}" if overlaid.aligned else f"step {step:,}" for step in chosen]
    table = make_table("measure", "run", *heads, named=("run",))
    for measure, of_run in overlaid.measures.items():
        for row, (name, series) in enumerate(of_run.items()):
            values = [value_at(series, step) for step in chosen]
            shown = ["" if value is None else number(value, 3) for value in values]
            table.add_row("" if row else visible(measure), visible(name), *shown)
    console.print(table)


def _spread(steps: list[int], most: int) -> list[int]:
    """Return at most ``most`` of the steps, or three, the first and the last among them."""
    count = min(len(steps), max(3, most))
    return [steps[round(k * (len(steps) - 1) / max(1, count - 1))] for k in range(count)]


def print_estimate(found: Estimate, console: Console) -> None:
    """Print an estimate."""
    from backlight.monitors.grokking.model.measures import TIERS

    table = make_table("part", "times", "each", "time", "disk", "memory")
    for part in (*found.training, *found.measured):
        disk = size(part.total_disk) if part.total_disk else ""
        memory = size(part.memory) if part.memory else ""
        table.add_row(
            part.name, str(part.times), duration(part.seconds), duration(part.total_seconds), disk, memory
        )
    table.add_row(
        "in all", "", "", duration(found.seconds()), size(found.disk()), size(found.memory()), style="bold"
    )
    free = f"{size(found.free_disk)} free", f"{size(found.free_memory)} free"
    table.add_row("this machine", "", "", "", *free, style="dim")
    console.print(table)
    tier = found.fitting()
    if tier == TIERS[0]:
        console.print("Everything fits.")
        return
    console.print(f"Does not fit: {found.problem(TIERS[0])}.")
    if tier:
        names = ", ".join(found.left_out(tier))
        console.print(f"With --degrade: {tier}; left out: {names}.")
    else:
        console.print(f"Not even scalars alone fit: {found.problem(TIERS[-1])}.")
