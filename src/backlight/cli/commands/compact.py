"""``backlight compact``: tidy a run directory, after a kill for instance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compact(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="Keep only every Nth recorded step of each series.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also where this machine cannot tell whether the writer lives.")
    ] = False,
) -> None:
    """Finish what a killed process left open, and make the files small."""
    from backlight.store.maintenance.compact import compact as tidy

    done = tidy(path, every=every, force=force)
    print(f"{done.before / 1e6:.1f} MB before, {done.after / 1e6:.1f} MB after")
    for line in done.notes:
        print(line)


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("compact")(compact)
