"""``backlight grok detect``: the verdict on grokking of stored runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def detect(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    control: Annotated[
        Path | None, typer.Option("--control", help="The matched control, whatever it says of itself.")
    ] = None,
    chance: Annotated[
        float | None, typer.Option("--chance", help="Accuracy of guessing, in place of what a run states.")
    ] = None,
    test_size: Annotated[
        int | None, typer.Option("--test-size", help="Test samples, in place of what a run states.")
    ] = None,
) -> int:
    """Judge runs by their accuracies, with the intervals of both times, the sweep and the control.

    A control is found among the given runs and in the folders beside each. Exit code 2 if a run cannot be
    judged; the others are.
    """
    from backlight.analysis.grokking import beside, examine
    from backlight.cli.render.grok import print_examined
    from backlight.monitors.grokking.model.curves import DetectionError
    from backlight.store.read.run import open_run

    opened = [open_run(path) for path in runs]
    against = open_run(control) if control is not None else None
    console, out, failed = Console(), [], False
    for run in opened:
        try:
            found = examine(
                run, [*opened, *beside(run.path)], control=against, chance=chance, test_size=test_size
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


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("detect")(detect)
