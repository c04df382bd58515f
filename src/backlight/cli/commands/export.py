"""``backlight export``: a run as CSV, Parquet or HDF5."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.options import Overwrite, Run


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


@command("export", "Runs")
def export(
    path: Run,
    target: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File to write: .csv, .parquet or .h5.")
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option("--to", help="Tracker NAME or NAME=TARGET (repeatable)."),
    ] = None,
    overwrite: Overwrite = False,
    rows: Annotated[
        Table | None,
        typer.Option(
            "--rows",
            help="Rows: a parameter or spectrum at a step, or a table.",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Export all tables, as NAME.<table>.csv or .parquet.")
    ] = False,
    max_directions: Annotated[
        int | None, typer.Option("--max-directions", help="Maximum directions of a layer at a step.")
    ] = None,
) -> None:
    """Export a run to CSV, Parquet or HDF5, or to a tracker.

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
