"""``backlight doctor``: what works on this machine, what does not, and why."""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}


@command("doctor", "Start")
def doctor(
    as_json: Json = False,
) -> int:
    """Check what works on this machine.

    Exit code 1 if training scripts cannot be watched here.
    """
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
            state = Text(check.state, style=_COLOURS[check.state])
            table.add_row(state, check.what, check.found, check.meaning)
        make_console().print(table)
    return int(any(check.state == "missing" and check.required for check in checks))
