"""``backlight export``: a run as CSV, Parquet or HDF5."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    target: Annotated[Path, typer.Argument(metavar="FILE", help="File to write: .csv, .parquet or .h5.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write the series of a run to a file for other programs, and print what was written."""
    from backlight.store.export import export as write
    from backlight.store.reader import open_run

    run = open_run(path)
    for written in write(run, target, overwrite=overwrite):
        print(written)


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("export")(export)
