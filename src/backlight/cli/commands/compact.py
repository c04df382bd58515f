"""``backlight compact``: tidy a run folder, after a kill for instance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compact(path: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]) -> None:
    """Finish what a killed process left open, and make the files small."""
    from backlight.store.compaction import compact as tidy

    print(tidy(path))


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("compact")(compact)
