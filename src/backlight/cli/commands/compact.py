"""``backlight compact``: tidy a run directory, after a kill for instance."""

from __future__ import annotations

from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.options import Run


@command("compact", "Runs")
def compact(
    path: Run,
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="Recorded steps between those that are kept.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compact although the writer may still run.")
    ] = False,
) -> None:
    """Repair and compact a run directory."""
    from backlight.store.maintenance.compact import compact as tidy

    done = tidy(path, every=every, force=force)
    print(f"{done.before / 1e6:.1f} MB before, {done.after / 1e6:.1f} MB after")
    for line in done.notes:
        print(line)
