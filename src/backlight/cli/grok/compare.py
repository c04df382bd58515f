"""``backlight grok compare``: measures of several runs over each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two or more run directories.")],
    align: Annotated[
        bool, typer.Option("--align", help="Count the steps of each run from its t_generalise.")
    ] = False,
    measure: Annotated[
        list[str] | None, typer.Option("--measure", help="Only measures that begin so; again for more.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write one HTML file that works offline.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object with every curve.")] = False,
) -> None:
    """Lay accuracies, losses and measures of several runs over each other, by step or from t_generalise."""
    from backlight.analysis.overlay import as_page, overlay
    from backlight.cli.render.grok import print_overlaid
    from backlight.report.overlay import write_overlay
    from backlight.store.read.run import open_run

    overlaid = overlay([open_run(path) for path in runs], align=align, only=measure or ())
    if as_json:
        print(json.dumps(overlaid.as_json(), indent=2))
    else:
        print_overlaid(overlaid, Console())
    if out is not None:
        written = write_overlay(as_page(overlaid), out)
        print(written, file=sys.stderr if as_json else sys.stdout)


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("compare")(compare)
