"""``backlight grok estimate``: cost of an experiment and free resources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from backlight.cli.app import command
from backlight.cli.commands.grok.options import DEVICE, PRESET, SEED, SET, STEPS, overlay
from backlight.cli.console import make_console
from backlight.cli.options import Json

if TYPE_CHECKING:
    from backlight.experiments.cost import Estimate


@command("estimate", group="grok")
def estimate(
    what: Annotated[str, typer.Argument(metavar="CONFIG|NAME", help="YAML file or name of an experiment.")],
    preset: Annotated[str | None, PRESET] = None,
    changes: Annotated[list[str] | None, SET] = None,
    steps: Annotated[int | None, STEPS] = None,
    seed: Annotated[int | None, SEED] = None,
    device: Annotated[str | None, DEVICE] = None,
    out: Annotated[Path, typer.Option("--out", help="Directory whose free disk space is checked.")] = Path(
        "runs"
    ),
    as_json: Json = False,
) -> None:
    """Estimate time, memory and disk of an experiment.

    Times a few steps and each measure.
    """
    from backlight.cli.commands.grok.options import configured
    from backlight.experiments.cost import estimate_of

    file = Path(what)
    named = None if file.suffix in {".yaml", ".yml"} else what
    options = overlay(changes, steps=steps, seed=seed, device=device)
    configuration = configured(named, preset, None if named else file, options)
    console = make_console(stderr=True)
    with console.status("timing") as status:
        found = estimate_of(configuration, out, on_part=lambda part: status.update(f"timing {part}"))
    if as_json:
        print(json.dumps(found.as_mapping(), indent=2))
    else:
        show(found, make_console())


def show(found: Estimate, console: Console) -> None:
    """Print an estimate."""
    from backlight.monitors.grokking.model.measures import TIERS
    from backlight.text import size

    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    for column in ("times", "each", "time", "disk", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in (*found.training, *found.measured):
        disk = size(part.total_disk) if part.total_disk else ""
        memory = size(part.memory) if part.memory else ""
        each = f"{1000 * part.seconds:.3g} ms"
        table.add_row(part.name, str(part.times), each, duration(part.total_seconds), disk, memory)
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


def duration(seconds: float) -> str:
    """Return seconds in words."""
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.2g} s"
