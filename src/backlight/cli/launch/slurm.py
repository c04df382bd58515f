"""``backlight run --slurm``: the same command once more, under torchrun on the nodes of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

_HERE_ONLY = frozenset({"slurm", "slurm_script", "out", "script"})


def launch(
    context: typer.Context,
    target: str,
    arguments: list[str],
    out: Path | None,
    slurm: list[str],
    script: Path | None,
) -> int:
    """Submit the watched training as one job, or write its batch script; return the exit code."""
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
        said = [line for line in str(problem).splitlines() if ENDED in line]
        reason = f": {ENDED}{said[-1].partition(ENDED)[2]}" if said else ""
        print(f"backlight: job {handle.job_id} failed{reason}; its output is in {job.logs}", file=sys.stderr)
        return 2
    from backlight.cli.render.summary import after_run

    after_run(path)
    return 0


def _options(context: typer.Context) -> list[str]:
    """Return the options of ``backlight run`` that were given, but those that speak of the job."""
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
