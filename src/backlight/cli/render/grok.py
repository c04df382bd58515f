"""Prints diagnoses of grokking and overlaid runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from backlight.cli.console import Page, make_table
from backlight.monitors.grokking.model.analysis import GrokkingAnalysis, following_table
from backlight.text import duration, number, size, visible

if TYPE_CHECKING:
    from backlight.experiments.cost import Estimate

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
