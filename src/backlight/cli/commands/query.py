"""``backlight query``: SQL over a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.options import Json, Overwrite, Run


@command("query", "Runs")
def query(
    path: Run,
    statement: Annotated[
        str | None, typer.Argument(metavar="SQL", help="One SELECT statement of DuckDB.")
    ] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="List tables and columns with their units.")
    ] = False,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="File for all rows, .parquet or .csv.")] = None,
    overwrite: Overwrite = False,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Maximum rows of the printed table.")] = 50,
) -> None:
    """Query a run with SQL.

    Series, scalars, events, findings and parameters are tables, for example:
    backlight query RUN "select parameter, max(norm) from gradient group by all order by 2 desc".
    The statement can read this run only, and write nothing.

    Raises
    ------
    typer.BadParameter
        If there is neither a statement nor --tables, or two output formats are given.
    """
    from backlight.analysis import sql
    from backlight.cli.render.query import print_rows, print_tables
    from backlight.store.read.run import open_run

    if (statement is None) != tables:
        raise typer.BadParameter("give one SELECT, or --tables for what it can ask about")
    if as_json + as_csv + (out is not None) > 1:
        raise typer.BadParameter("--json, --csv and --out exclude one another")
    run = open_run(path)
    if statement is None:
        print_tables(sql.tables(run), as_json=as_json)
        return
    with sql.query(run, statement) as answer:
        if out is not None:
            print(sql.write(answer, out, overwrite=overwrite))
        elif as_csv:
            sql.print_csv(answer, sys.stdout)
        elif as_json:
            listed = [dict(zip(answer.names, row, strict=True)) for row in answer.rows()]
            print(json.dumps(listed, indent=2, default=str))
        else:
            print_rows(answer, rows)
