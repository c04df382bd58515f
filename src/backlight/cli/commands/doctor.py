"""``backlight doctor``: what works on this machine, what does not, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> int:
    """Check what backlight needs; exit code 1 if training cannot be watched here."""
    from backlight.cli.doctor import examine
    from backlight.records import to_json

    checks = examine()
    if as_json:
        print(json.dumps(to_json(checks), indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("", "what", "found", "what it means"):
            table.add_column(column, overflow="fold")
        for check in checks:
            colour = _COLOURS[check.state]
            table.add_row(f"[{colour}]{check.state}[/]", check.what, check.found, check.meaning)
        Console().print(table)
    return int(any(check.state == "missing" and check.required for check in checks))


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("doctor")(doctor)
