"""``backlight findings``: print the findings of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def findings(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    fail_on: Annotated[
        str | None,
        typer.Option("--fail-on", help="Exit 1 on this severity or rule, as 'error' or 'non_finite,spike'."),
    ] = None,
) -> int:
    """Print the findings of a run."""
    from backlight.findings.evaluate import findings_of
    from backlight.findings.fail_on import parse_fail_on
    from backlight.records import to_json
    from backlight.report.terminal import print_findings
    from backlight.store.read.run import open_run

    failing = parse_fail_on(fail_on) if fail_on is not None else None
    run = open_run(path)
    found = findings_of(run)
    if as_json:
        print(json.dumps(to_json(found), indent=2, allow_nan=True))
    else:
        print_findings(run, found, Console())
    return int(failing is not None and any(map(failing, found)))


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("findings")(findings)
