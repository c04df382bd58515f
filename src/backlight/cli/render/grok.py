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


def print_examined(analysis: GrokkingAnalysis, console: Console) -> None:
    """Print one run: verdict, times, conditions, sweep, control, and what follows the test accuracy."""
    detection = analysis.detection
    facts = [analysis.facts.experiment, analysis.facts.control and f"control: {analysis.facts.control}"]
    console.print(Text.assemble(
        (visible(analysis.run.location), "bold"), (f"  {visible(', '.join(t for t in facts if t))}", "dim")
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
        grokked = sum(point.grokking for point in detection.sweep)
        lines = [p.train_accuracy for p in detection.sweep], [p.test_share for p in detection.sweep]
        console.print(
            f"  Sweep: grokking at {grokked} of {len(detection.sweep)} lines, training accuracy "
            f"{min(lines[0]):.3g} to {max(lines[0]):.3g}, {min(lines[1]):.3g} to {max(lines[1]):.3g} of "
            "the way to the plateau."
        )
    if analysis.changes is None:
        console.print("  Change points: not measured; pip install 'backlight[research]'.", style="dim")
    elif analysis.changes:
        shown = ", ".join(number(step) for step in analysis.changes[:8])
        console.print(f"  Change points of the test accuracy: step {shown}.")
    for note in detection.notes:
        console.print(f"  {visible(note)}.", style="dim")
    _print_control(analysis, console)
    if not analysis.facts.control:  # its test accuracy is noise, which nothing can follow
        _print_following(analysis, console)
    console.print()


def _print_control(analysis: GrokkingAnalysis, console: Console) -> None:
    if analysis.facts.control:
        return
    if analysis.control is None or analysis.control_detection is None:
        console.print(
            "  No matched control was found: no measure can be attributed to grokking. "
            "Run the same with --control random-labels.",
            style="yellow" if analysis.detection.verdict == "grokking" else "dim",
        )
        return
    theirs = analysis.control_detection
    console.print(f"  Control {visible(analysis.control.path.name)}: {theirs.words}. {theirs.claim}")


def _print_following(analysis: GrokkingAnalysis, console: Console) -> None:
    if not analysis.following:
        return
    Page(console).table(following_table(analysis))
    explained = "corr.: rank correlation with the test accuracy after memorisation; lead in steps"
    if analysis.controls:
        explained += (
            "; control: how far the measure of the controls moves with it, as a share; q: false-discovery "
            "rate at which the two differ"
        )
    console.print(f"  {explained}.", style="dim")
    if analysis.controls:
        console.print(f"  {analysis.signals()}")


def print_estimate(estimate: Estimate, console: Console) -> None:
    """Print an estimate."""
    from backlight.monitors.grokking.model.measures import TIERS

    table = make_table("part", "times", "each", "time", "disk", "memory")
    for part in (*estimate.training, *estimate.measured):
        disk = size(part.total_disk) if part.total_disk else ""
        memory = size(part.memory) if part.memory else ""
        table.add_row(
            part.name, str(part.times), duration(part.seconds), duration(part.total_seconds), disk, memory
        )
    table.add_row(
        "in all",
        "",
        "",
        duration(estimate.seconds()),
        size(estimate.disk()),
        size(estimate.memory()),
        style="bold",
    )
    free = f"{size(estimate.free_disk)} free", f"{size(estimate.free_memory)} free"
    table.add_row("this machine", "", "", "", *free, style="dim")
    console.print(table)
    tier = estimate.fitting()
    if tier == TIERS[0]:
        console.print("Everything fits.")
        return
    console.print(f"Does not fit: {estimate.problem(TIERS[0])}.")
    if tier:
        names = ", ".join(estimate.left_out(tier))
        console.print(f"With --degrade: {tier}; left out: {names}.")
    else:
        console.print(f"Not even scalars alone fit: {estimate.problem(TIERS[-1])}.")
