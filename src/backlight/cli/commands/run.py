"""``backlight run``: watch a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script; with -m, a module.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; without it runs/<script>-<time>.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    monitors: Annotated[
        str | None,
        typer.Option("--monitors", help="Monitors that measure, by commas: health,stalls,steptime."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", min=1, help="Record every Nth step; without it 1 % of the time decides."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="End the script cleanly after N steps.")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option("--group", help="A group of parameters, NAME=PATTERN; again for more.")
    ] = None,
    histogram: Annotated[bool, typer.Option("--histogram", help="Record exponent histograms.")] = False,
    exact_updates: Annotated[
        int | None,
        typer.Option(
            "--exact-updates", min=1, help="Measure updates over all weights, every Nth recorded step."
        ),
    ] = None,
    per_backward: Annotated[
        bool, typer.Option("--per-backward", help="Also record after every backward of an accumulation.")
    ] = False,
    reduce: Annotated[
        bool,
        typer.Option("--reduce", help="Join the total norm over all ranks while they run; needs --every."),
    ] = False,
    stall: Annotated[
        float | None,
        typer.Option("--stall", min=0.5, help="Seconds without progress after which a verdict is due."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", help="Print lines while backward runs: gradients,modules,buckets."),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option("--tracker", help="Send numbers to NAME or NAME=TARGET (tensorboard); again for more."),
    ] = None,
    max_disk: Annotated[
        str | None, typer.Option("--max-disk", help="Most that the run may take: 500M, 2G.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings and thresholds from a TOML file.")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm",
            help="Run as a job of torchrun on a cluster, KEY=VALUE: nodes=2; again for more. "
            "cluster=local runs it here.",
        ),
    ] = None,
    slurm_script: Annotated[
        Path | None, typer.Option("--slurm-script", help="Write the batch script of that job instead.")
    ] = None,
) -> int:
    """Watch a training script: backlight run [OPTIONS] SCRIPT [ITS ARGUMENTS].

    The script's exit code, output and signals pass through. What backlight has to say goes to
    standard error when the script is over.
    """
    from backlight.cli.options import parse_groups, parse_size
    from backlight.cli.render.summary import after_run
    from backlight.launch.script import check, launch
    from backlight.session.settings import Settings

    check(script, module=module)
    given: dict[str, Any] = {
        "monitors": monitors,
        "every": every,
        "steps": steps,
        "groups": parse_groups(group) if group else None,
        "histogram": histogram or None,
        "exact_updates": exact_updates,
        "per_backward": per_backward or None,
        "reduce": reduce or None,
        "stall": stall,
        "trace": trace,
        "trackers": tuple(tracker) if tracker else None,
        "max_disk": None if max_disk is None else parse_size(max_disk, "--max-disk"),
    }
    given = {name: value for name, value in given.items() if value is not None}
    settings = Settings.read(config, given) if config is not None else Settings.of(given)
    arguments = list(context.args)
    if slurm is not None or slurm_script is not None:
        from backlight.cli.launch.slurm import launch as launch_job

        return launch_job(context, script, arguments, out, slurm or [], slurm_script)
    from backlight.distributed import world
    from backlight.session.watch import Watch

    watch = Watch((), (), settings, out, script=script, arguments=tuple(arguments))
    code = launch(watch, script, arguments, module=module)
    sys.stdout.flush()
    if world().rank == 0:  # the run is one, whoever reads it
        after_run(watch.path)
    return code


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``; what follows SCRIPT belongs to the script."""
    app.command(
        "run",
        context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    )(run)
