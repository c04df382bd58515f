"""``backlight join``: bring together what hosts without a shared folder recorded of one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command


@command("join", "Cluster")
def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run of rank 0.")],
    parts: Annotated[
        list[Path], typer.Argument(metavar="PART...", help="Directories that other hosts wrote.")
    ],
) -> None:
    """Merge what hosts without a shared file system recorded.

    Copies the ranks into the run of rank 0; the parts stay as they are.
    """
    from backlight.store.maintenance.merge_hosts import merge_hosts

    joined = merge_hosts(run, parts)
    for attempt, ranks in sorted(joined.ranks.items()):
        print(f"attempt {attempt}: ranks {', '.join(map(str, sorted(ranks)))}")
    print(f"{joined.files} files copied into {run}" if joined.files else f"{run} holds all of it already")
