"""``backlight attach``: look into a process that is stuck."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console


def attach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="The process.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, help="How long to look.")] = 2.0,
    native: Annotated[
        bool, typer.Option("--native/--no-native", help="Take native stacks, which pauses it for a moment.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Say what a process does, all threads, Python and native, and what cannot be seen from outside."""
    from backlight.monitors.stalls.model.attach import attach as look_into
    from backlight.monitors.stalls.model.stacks import format_sample
    from backlight.records import to_json

    found = look_into(pid, seconds, native=native)
    if as_json:
        print(json.dumps(to_json(found)))
        return
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(found.diagnosis.claim)
    console.print(f"confidence {found.diagnosis.confidence}; refuted if {found.diagnosis.refuted_if}")
    console.print(f"next: {found.diagnosis.next_check}\n")
    console.print(found.threads)
    for sample in found.samples:
        console.print(format_sample(sample))
    for what in found.unseen:
        console.print(f"not seen: {what}")


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("attach")(attach)
