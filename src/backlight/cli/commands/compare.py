"""``backlight compare``: two runs, or the reason why they cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="The run to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="The run to compare.")],
    factor: Annotated[
        str | None, typer.Option("--factor", help="The one argument or field that may differ, such as --lr.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> int:
    """Compare the series of two runs whose fingerprints agree; exit code 1 if they do not."""
    from backlight.cli.comparing import print_comparison
    from backlight.records import to_json
    from backlight.session.comparison import compare as compare_runs
    from backlight.store.reader import open_run

    one = open_run(first)
    other = open_run(second)
    comparison = compare_runs(one, other, factor=factor)
    if as_json:
        print(json.dumps({"verdict": comparison.verdict, **to_json(comparison)}, indent=2))
    else:
        print_comparison(comparison, Console())
    return 0 if comparison.comparable else 1


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("compare")(compare)
