"""``backlight top``: a run that trains, live in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.console import make_console


@command("top", "Runs")
def top(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory; it may still be empty.")],
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame; the default without a terminal.")
    ] = False,
) -> None:
    """Show a run live in the terminal.

    Press q or Ctrl-C to quit.
    """
    from backlight.analysis.live import followed
    from backlight.cli.render.live import show

    (run,) = followed([path])
    show(run, make_console(), once=once)
