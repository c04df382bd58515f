"""``backlight top``: a run that trains, live in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def top(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory; it may still be empty.")],
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and leave; so it is where this is no terminal.")
    ] = False,
) -> None:
    """Show a training live in the terminal: loss, phases, parameters, findings. q or Ctrl-C leaves."""
    from backlight.analysis.live import followed
    from backlight.cli.render.live import show

    (run,) = followed([path])
    show(run, Console(), once=once)


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("top")(top)
