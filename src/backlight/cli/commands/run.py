"""``backlight run``: watch a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from backlight.cli.app import command
from backlight.cli.options import Module, Script, SlurmScript


@command("run", "Start", script=True)
def run(
    context: typer.Context,
    script: Script,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; default runs/<script>-<time>.")
    ] = None,
    module: Module = False,
    monitors: Annotated[
        str | None,
        typer.Option("--monitors", help="Monitors, separated by commas: health,stalls,steptime."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", min=1, help="Steps between recordings; default: within 1 % of the time."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps after which the script is ended cleanly.")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option("--group", help="Group of parameters, NAME=PATTERN (repeatable).")
    ] = None,
    histogram: Annotated[bool, typer.Option("--histogram", help="Record exponent histograms.")] = False,
    exact_updates: Annotated[
        int | None,
        typer.Option("--exact-updates", min=1, help="Recorded steps between exact update measurements."),
    ] = None,
    per_backward: Annotated[
        bool, typer.Option("--per-backward", help="Record each backward pass of an accumulation.")
    ] = False,
    reduce: Annotated[
        bool,
        typer.Option("--reduce", help="Reduce the total norm over ranks; needs --every."),
    ] = False,
    stall: Annotated[
        float | None,
        typer.Option("--stall", min=0.5, help="Seconds without progress until a diagnosis."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", help="Trace of backward to print: gradients,modules,buckets."),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option("--tracker", help="Tracker, NAME or NAME=TARGET, as tensorboard (repeatable)."),
    ] = None,
    max_disk: Annotated[
        str | None, typer.Option("--max-disk", help="Maximum size of the run directory, as 500M or 2G.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of settings and thresholds.")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm",
            help="Slurm option, as nodes=2 or cluster=local (repeatable).",
        ),
    ] = None,
    slurm_script: SlurmScript = None,
) -> int:
    """Watch a training script.

    Options after SCRIPT belong to the script. Its exit code, output and signals pass through; findings are
    printed to standard error when it has ended.
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
        return _submit(context, script, arguments, out, slurm or [], slurm_script)
    from backlight.distributed import world
    from backlight.session.watch import Watch

    watch = Watch((), (), settings, out, script=script, arguments=tuple(arguments))
    code = launch(watch, script, arguments, module=module)
    sys.stdout.flush()
    if world().rank == 0:  # once for all ranks
        after_run(watch.path)
    return code


_HERE_ONLY = frozenset({"slurm", "slurm_script", "out", "script"})


def _submit(
    context: typer.Context,
    target: str,
    arguments: list[str],
    out: Path | None,
    slurm: list[str],
    script: Path | None,
) -> int:
    """Submit the watched run as one job, or write its batch script; return the exit code."""
    from backlight.launch.slurm import ENDED, Job, batch_script, parameters, require, submit, write_script
    from backlight.store.platform.filesystem import file_system_type, is_network_type
    from backlight.store.write.attempt import default_path

    given = parameters(slurm)
    path = (out if out is not None else default_path(target)).absolute()
    own = ["-m", "backlight", "run", "--out", str(path), *_options(context)]
    job = Job.of(given, [*own, target, *arguments], path)
    if script is None:
        require("local" if job.local else given.get("cluster"))
    kind = file_system_type(path)
    if job.nodes > 1 and not is_network_type(kind):
        print(
            f"backlight: {path} is on {kind or 'an unknown file system'}, which other nodes may not see; "
            "ranks that find no run there write a folder of their own, to be joined by `backlight join` "
            "(docs/clusters.md)",
            file=sys.stderr,
        )
    if script is not None:
        write_script(script, batch_script(job), job.logs)
        print(script)
        return 0
    handle = submit(job)
    print(f"job {handle.job_id}: run {path}, output in {job.logs}")
    if not job.local:
        return 0
    problem = handle.exception()
    if problem is not None:
        lines = [line for line in str(problem).splitlines() if ENDED in line]
        reason = f": {ENDED}{lines[-1].partition(ENDED)[2]}" if lines else ""
        print(f"backlight: job {handle.job_id} failed{reason}; its output is in {job.logs}", file=sys.stderr)
        return 2
    from backlight.cli.render.summary import after_run

    after_run(path)
    return 0


def _options(context: typer.Context) -> list[str]:
    """Return the options of ``backlight run`` that were given, without those of the job."""
    line: list[str] = []
    parameter: Any
    for parameter in context.command.params:
        value = context.params.get(parameter.name)
        if parameter.name in _HERE_ONLY or value is None or value is False or not parameter.opts:
            continue
        flag = parameter.opts[0]
        if value is True:
            line.append(flag)
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            line += [flag, str(one)]
    return line
