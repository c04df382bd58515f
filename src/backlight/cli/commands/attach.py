"""``backlight attach``: diagnose a running process."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json


@command("attach", "Diagnose")
def attach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="Process id.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, help="Observation time in seconds.")] = 2.0,
    native: Annotated[
        bool,
        typer.Option("--native/--no-native", help="Take native stacks, which pauses the process briefly."),
    ] = True,
    as_json: Json = False,
) -> None:
    """Diagnose a running process from outside.

    Reports all threads, Python and native, and what is not observable.
    """
    from backlight.monitors.stalls.model.attach import attach as look_into
    from backlight.monitors.stalls.model.stacks import format_sample
    from backlight.records import to_json

    found = look_into(pid, seconds, native=native)
    if as_json:
        print(json.dumps(to_json(found)))
        return
    console = make_console(soft_wrap=True)
    console.print(found.diagnosis.claim)
    console.print(f"confidence {found.diagnosis.confidence}; refuted if {found.diagnosis.refuted_if}")
    console.print(f"next: {found.diagnosis.next_check}\n")
    console.print(found.threads)
    for sample in found.samples:
        console.print(format_sample(sample))
    for what in found.unseen:
        console.print(f"not observable: {what}")
