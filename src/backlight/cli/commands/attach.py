"""``backlight attach``: diagnose a running process, or dumps of the collectives of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from backlight.cli.app import command
from backlight.cli.console import print_json
from backlight.cli.options import Full, Json


@command(
    "attach", "backlight attach 4711", "backlight attach 4711 --seconds 10 --no-native",
    "backlight attach --job 4711",
    "backlight attach --flight-recorder dumps/ --run runs/first",
)  # fmt: skip
def attach(
    pid: Annotated[int | None, Argument(metavar="PID", help="Process id.", show_default=False)] = None,
    seconds: Annotated[float, Option(metavar="SECONDS", min=0.5, help="Observation time.")] = 2.0,
    native: Annotated[
        bool, Option("--native/--no-native", help="Take native stacks, which pauses the process briefly.")
    ] = True,
    job: Annotated[
        bool, Option("--job", help="All ranks of the job of PID on this machine, in one diagnosis.")
    ] = False,
    flight_recorder: Annotated[
        Path | None, Option(metavar="DIR", help="Dumps of torch's flight recorder, one file per rank.")
    ] = None,
    run: Annotated[
        Path | None, Option(metavar="RUN", help="Run of these dumps, for the steps of its ranks.")
    ] = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Diagnose a running process, a job, or flight recorder dumps.

    --job groups ranks by identical stack; --flight-recorder names the rank that skipped or changed a
    collective. --full prints all threads, Python and native.
    """
    from backlight.cli.render.attached import print_attached, print_dumps, print_job
    from backlight.watchdog.attach import attach as observe
    from backlight.watchdog.attach import attach_dumps, attach_job

    if (pid is None) == (flight_recorder is None):
        raise ValueError("attach: expected either the PID of a process or --flight-recorder DIR")
    if run is not None and flight_recorder is None:
        raise ValueError("attach: --run goes with --flight-recorder DIR; a watched process has its run")
    if flight_recorder is not None:
        dumps = attach_dumps(flight_recorder, run)
        print_json(dumps) if as_json else print_dumps(dumps, full=full)
    elif pid is not None and job:
        ranks = attach_job(pid, seconds)
        print_json(ranks) if as_json else print_job(ranks, full=full)
    elif pid is not None:
        attached = observe(pid, seconds, native=native)
        print_json(attached) if as_json else print_attached(attached, full=full)
