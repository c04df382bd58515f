"""``backlight attach``: diagnose a running process, or dumps of the collectives of a job."""

from __future__ import annotations

from pathlib import Path

import click

from backlight.cli.app import command
from backlight.cli.console import print_json
from backlight.cli.options import PATH, full_option, json_option


@command(
    "attach", "backlight attach 4711", "backlight attach 4711 --seconds 10 --no-native",
    "backlight attach --job 4711",
    "backlight attach --flight-recorder dumps/ --run runs/first",
)  # fmt: skip
@click.argument("pid", required=False, type=int, metavar="[PID]", help="Process id.")
@click.option(
    "--seconds", default=2.0, type=click.FloatRange(min=0.5), metavar="SECONDS", help="Observation time."
)
@click.option(
    "--native/--no-native", default=True, help="Take native stacks, which pauses the process briefly."
)
@click.option("--job", is_flag=True, help="All ranks of the job of PID on this machine, in one diagnosis.")
@click.option(
    "--flight-recorder", type=PATH, metavar="DIR", help="Dumps of torch's flight recorder, one file per rank."
)
@click.option("--run", type=PATH, metavar="RUN", help="Run of these dumps, for the steps of its ranks.")
@full_option
@json_option
def attach(
    *,
    pid: int | None,
    seconds: float,
    native: bool,
    job: bool,
    flight_recorder: Path | None,
    run: Path | None,
    full: bool,
    as_json: bool,
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
