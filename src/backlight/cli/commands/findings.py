"""``backlight findings``: print the findings of a run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json, Run


@command("findings", "Runs")
def findings(
    path: Run,
    as_json: Json = False,
    fail_on: Annotated[
        str | None,
        typer.Option("--fail-on", help="Severities and rules that exit with 1, as error,spike."),
    ] = None,
) -> int:
    """Print the findings of a run."""
    from backlight.findings.evaluate import findings_of, parse_fail_on
    from backlight.records import to_json
    from backlight.report.terminal import print_findings
    from backlight.store.read.run import open_run

    failing = parse_fail_on(fail_on) if fail_on is not None else None
    run = open_run(path)
    found = findings_of(run)
    if as_json:
        print(json.dumps(to_json(found), indent=2, allow_nan=True))
    else:
        print_findings(run, found, make_console())
    return int(failing is not None and any(map(failing, found)))
