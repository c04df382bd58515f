"""``backlight grok detect``: the verdict on grokking of stored runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json


@command("detect", group="grok")
def detect(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    as_json: Json = False,
    control: Annotated[
        Path | None, typer.Option("--control", help="Run directory of the matched control.")
    ] = None,
    chance: Annotated[
        float | None, typer.Option("--chance", help="Accuracy of guessing; default as recorded.")
    ] = None,
    test_size: Annotated[
        int | None, typer.Option("--test-size", help="Number of test samples; default as recorded.")
    ] = None,
) -> int:
    """Diagnose grokking in stored runs.

    A control is found among the given runs and in directories next to each. Exit code 2 if a run cannot be
    evaluated; the others are.
    """
    from backlight.cli.render.grok import print_examined
    from backlight.monitors.grokking.model.analysis import analyse, neighbours
    from backlight.monitors.grokking.model.curves import DetectionError
    from backlight.store.read.run import open_run

    opened = [open_run(path) for path in runs]
    against = open_run(control) if control is not None else None
    console, out, failed = make_console(), [], False
    for run in opened:
        try:
            found = analyse(
                run, [*opened, *neighbours(run.path)], control=against, chance=chance, test_size=test_size
            )
        except DetectionError as error:
            failed = True
            out.append({"run": str(run.path), "error": str(error)})
            print(f"backlight: {error}", file=sys.stderr)
            continue
        out.append(found.as_json())
        if not as_json:
            print_examined(found, console)
    if as_json:
        print(json.dumps(out, indent=2))
    return 2 if failed else 0
