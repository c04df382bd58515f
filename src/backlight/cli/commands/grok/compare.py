"""``backlight grok compare``: overlay measures of several runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json


@command("compare", group="grok")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two or more run directories.")],
    align: Annotated[
        bool, typer.Option("--align", help="Count steps of each run from its generalisation.")
    ] = False,
    measure: Annotated[
        list[str] | None, typer.Option("--measure", help="Prefix of measures to show (repeatable).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="HTML file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Overlay measures of several runs by step or generalisation."""
    from backlight.analysis.overlay import as_page, overlay
    from backlight.cli.render.grok import print_overlaid
    from backlight.report.overlay import write_overlay
    from backlight.store.read.run import open_run

    overlaid = overlay([open_run(path) for path in runs], align=align, only=measure or ())
    if as_json:
        print(json.dumps(overlaid.as_json(), indent=2))
    else:
        print_overlaid(overlaid, make_console())
    if out is not None:
        written = write_overlay(as_page(overlaid), out)
        print(written, file=sys.stderr if as_json else sys.stdout)
