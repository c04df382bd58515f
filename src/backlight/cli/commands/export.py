"""``backlight export``: a run as CSV, Parquet or HDF5."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class Table(enum.StrEnum):
    """Tables of a run."""

    PARAMETERS = "parameters"
    SPECTRA = "spectra"


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    target: Annotated[Path, typer.Argument(metavar="FILE", help="File to write: .csv, .parquet or .h5.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    rows: Annotated[
        Table | None,
        typer.Option(
            "--rows",
            help="What a row is: a parameter at a step, or a direction of its spectra at a step. Without it "
            "spectra where a run holds them and no gradients.",
        ),
    ] = None,
    max_directions: Annotated[
        int | None, typer.Option("--max-directions", help="Most directions of a layer at a step.")
    ] = None,
) -> None:
    """Write the series of a run to a file for other programs, and print what was written."""
    from backlight.store.export import export as write
    from backlight.store.reader import open_run

    run = open_run(path)
    for written in write(run, target, overwrite=overwrite, rows=rows, max_directions=max_directions):
        print(written)


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("export")(export)
