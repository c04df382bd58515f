"""``backlight open``: live page of one or more runs."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command


@command("open", "Runs")
def open_page(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories; they may still be empty.")
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for any free port.")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
) -> None:
    """Serve a live page of one or more runs on this machine."""
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
