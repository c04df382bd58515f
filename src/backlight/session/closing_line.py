"""The line that a watch prints when it ends: its result, and how to read more."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from backlight.distributed import rank_and_size
from backlight.records import Finding
from backlight.session.print_monitor import print_line
from backlight.store.format.manifest import Progress
from backlight.store.read.attempt_files import wait_for_ranks
from backlight.store.read.run import open_run
from backlight.text import as_typed, count, visible


def print_result(path: Path, findings: Sequence[Finding], steps: int, progress: Progress) -> None:
    """Print the worst finding of the run in ``path``, or that there is none, to standard error, on rank 0."""
    # Here, since panels of the report are imported for it.
    from backlight.report.source import Source  # noqa: PLC0415
    from backlight.report.verdict import outcome, sampled_text  # noqa: PLC0415

    rank, size = rank_and_size()
    if rank != 0:
        return
    run = open_run(path, progress)
    said = outcome(Source(run, tuple(findings)))
    if said.tone == "unmeasured":
        text = f"{said.tally}. {said.detail}"
    else:
        hints = f" and {count(said.hints, 'hint')}" if said.hints else ""
        result = "" if said.headline in said.tally else f": {said.headline}"
        text = f"{said.tally}{hints} in {count(steps, 'step')}{result}."
        text += f" {said.lacks}." if said.lacks else ""
        sampled = sampled_text(run)
        text += f" Recorded: {sampled}." if sampled else ""
    text += "".join(f" {one.text}" for one in said.withdrawn)
    if size > 1 and not wait_for_ranks(path, 0.0):
        text += " Other ranks have not ended."
    print_line(f"{text} Next: backlight report {visible(shlex.quote(as_typed(path)))}", sys.stderr)
