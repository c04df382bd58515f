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
    GRADIENT = "gradient"
    UPDATE = "update"
    HISTOGRAM = "histogram"
    STEPS = "steps"
    SCALARS = "scalars"
    EVENTS = "events"
    FINDINGS = "findings"
    PARAMETER_TABLE = "parameter-table"
    ATTEMPTS = "attempts"


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    target: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File to write: .csv, .parquet or .h5.")
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to", help="Send it to a tracker, NAME or NAME=TARGET (tensorboard=DIR); again for more."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    rows: Annotated[
        Table | None,
        typer.Option(
            "--rows",
            help="What a row is: a parameter at a step, a direction of its spectra at a step, or one of a "
            "table of that name. Without it spectra where a run holds them and no gradients.",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Every table of the run, each as NAME.<table>.csv or .parquet.")
    ] = False,
    max_directions: Annotated[
        int | None, typer.Option("--max-directions", help="Most directions of a layer at a step.")
    ] = None,
) -> None:
    """Write the series of a run to a file for other programs, or to a tracker, and print what was written.

    Raises
    ------
    typer.BadParameter
        If neither a file nor a tracker is named, or --all and --rows are.
    """
    from backlight.findings.evaluate import findings_of
    from backlight.session.trackers.replay import send_all
    from backlight.store.export.files import export as write
    from backlight.store.export.files import export_tables
    from backlight.store.read.run import open_run
    from backlight.text import count

    if target is None and not to:
        raise typer.BadParameter("name a FILE to write, or a tracker with --to NAME=TARGET")
    if whole and (rows or max_directions):
        raise typer.BadParameter("--all is every table: leave --rows and --max-directions out")
    run = open_run(path)
    for sent in send_all(run, to or ()):
        print(f"{sent.tracker}: {count(sent.steps, 'step')}, {count(sent.findings, 'finding')}")
    if target is None:
        return
    if whole or rows not in {None, Table.PARAMETERS, Table.SPECTRA}:
        name = None if rows is None else "parameters" if rows is Table.PARAMETER_TABLE else rows.value
        made = export_tables(run, target, name, findings=lambda: findings_of(run), overwrite=overwrite)
        print(*made, sep="\n")
        return
    for written in write(run, target, overwrite=overwrite, rows=rows, max_directions=max_directions):
        print(written)


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("export")(export)
