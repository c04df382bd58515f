"""``backlight sweep``: what a recipe takes at several sizes, and how it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.options import Json


@command("sweep", "Diagnose")
def sweep(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.py", help="Recipe file.")],
    chosen: Annotated[
        list[str],
        typer.Option("--set", help="Setting with values, dim=512,768 (repeatable)."),
    ],
    steps: Annotated[int, typer.Option("--steps", min=12, help="Timed steps at each size.")] = 30,
    fake: Annotated[
        bool, typer.Option("--fake", help="Predict memory and operations on fake tensors.")
    ] = False,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Time limit of a size in seconds.")] = 600.0,
    max_memory: Annotated[
        float | None, typer.Option("--max-memory", min=0.1, help="Memory limit of a size in GiB.")
    ] = None,
    at: Annotated[
        list[str] | None, typer.Option("--at", help="Setting to extrapolate to, NAME=VALUE (repeatable).")
    ] = None,
    as_json: Json = False,
) -> int:
    """Measure a recipe at several sizes and fit how it scales.

    Each size runs in its own process.
    """
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
