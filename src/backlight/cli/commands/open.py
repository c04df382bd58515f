"""``backlight open``: a live page of a run that trains, or of several over each other."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def open_page(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="The run directories; they may still be empty.")
    ],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of this machine; 0 takes one that is free.")
    ] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser as well.")
    ] = True,
) -> None:
    """Serve a live page of one run or of several, on this machine alone, until Ctrl-C."""
    from backlight.analysis.live import Live, followed

    live = Live(followed(paths), port)
    print(f"backlight: live page at {live.address}\nbacklight: Ctrl-C closes it", file=sys.stderr, flush=True)
    if browser:
        webbrowser.open(live.address)
    try:
        live.run()
    except KeyboardInterrupt:
        pass  # how it is closed
    finally:
        live.close()


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("open")(open_page)
