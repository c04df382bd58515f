"""The samples of one step, printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backlight.cli.console import make_table, print_json
from backlight.monitors.health.model.spike_samples import SAMPLES, samples_of
from backlight.monitors.health.panels.samples import HEAD, rows_of
from backlight.terminal import make_console, write

if TYPE_CHECKING:
    from backlight.store.read.run import Run


def print_samples(run: Run, step: int, *, as_json: bool) -> None:
    """Print what is known of the samples of ``step``: sentences, then those with the largest shares."""
    text, events = samples_of(run, step), [e for e in run.events(SAMPLES) if e.step == step]
    if as_json:
        decomposed = [{"rank": event.rank, **event.payload} for event in events]
        print_json({"step": step, "text": text, "decomposed": decomposed})
        return
    write(text)
    rows = [row[1:] for event in events for row in rows_of(event)]
    if rows:
        table = make_table(*HEAD[1:])
        for row in rows:
            table.add_row(*row)
        make_console().print(table)
