"""What ``backlight doctor`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backlight.cli.console import Page, make_table
from backlight.cli.doctor import is_usable
from backlight.terminal import make_console
from backlight.text import count

if TYPE_CHECKING:
    from backlight.cli.doctor import Check

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red", "optional": "dim"}


def show(checks: Sequence[Check], *, full: bool = False) -> None:
    """Print whether scripts can be watched and what does not work; ``full`` adds all that does."""
    page = Page()
    by_name = {check.what: check for check in checks}
    if is_usable(checks):
        parts = (f"torch {by_name['torch'].found}", by_name["device"].found)
        page.sentence(("✓ ", "green"), f"Training scripts can be watched here: {', '.join(parts)}.")
    else:
        check = next(check for check in checks if check.required and check.state == "missing")
        page.sentence(("✕ ", "red"), f"{check.what}: {check.found}; {check.meaning}")
    if full:
        _print_table(checks)
    else:
        for check in checks:
            if check.state == "limited":
                page.sentence(("! ", "yellow"), f"{check.what}: {check.found}; {check.meaning}".rstrip("; "))
    optional = [check.what.strip("[]") for check in checks if check.state == "optional" and "[" in check.what]
    if optional:
        page.sentence(f"Not installed: {', '.join(optional)}. pip install 'backlight[NAME]' adds one.")
    if not full:
        page.say((f"All {count(len(checks), 'check')}: --full.", "dim"))


def _print_table(checks: Sequence[Check]) -> None:
    from rich.text import Text

    columns = ("what", "found", "what it means")
    table = make_table("", *columns, folded=columns)
    for check in checks:
        table.add_row(Text(check.state, style=_COLOURS[check.state]), check.what, check.found, check.meaning)
    make_console().print(table)
