"""``backlight sweep``: what a recipe takes at several sizes, and how it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def sweep(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.py", help="The recipe to build and run.")],
    chosen: Annotated[
        list[str],
        typer.Option("--set", help="A setting and its values: dim=512,768,1024; one value fixes it."),
    ],
    steps: Annotated[int, typer.Option("--steps", min=12, help="Steps to clock at each size.")] = 30,
    fake: Annotated[
        bool, typer.Option("--fake", help="Predict memory and operations on fake tensors; nothing need fit.")
    ] = False,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds for one size.")] = 600.0,
    max_memory: Annotated[
        float | None, typer.Option("--max-memory", min=0.1, help="GiB that one size may hold.")
    ] = None,
    at: Annotated[
        list[str] | None, typer.Option("--at", help="Ask the fits for another size, within twice the range.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> int:
    """Measure a recipe at several sizes, each in a process of its own, and fit how time and memory grow."""
    from backlight.cli.render.comparison import Turns
    from backlight.cli.render.sweep import as_object, show
    from backlight.diagnose.scaling.sweep import parse_axes
    from backlight.diagnose.scaling.sweep import sweep as run
    from backlight.launch.recipe import parse_settings

    axes = parse_axes(chosen)
    with Turns(quiet=as_json, what="size") as bar:
        found = run(
            recipe,
            axes,
            fake=fake,
            steps=steps,
            limit=limit,
            max_memory=None if max_memory is None else int(max_memory * 2**30),
            at=parse_settings(at) if at else None,
            on_point=bar,
        )
    if as_json:
        print(json.dumps(as_object(found), indent=2))
    else:
        show(found)
    return 0


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("sweep")(sweep)
