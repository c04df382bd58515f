"""``backlight run``: watch a training script. A module of its own: its options import the settings."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from backlight.cli.app import command
from backlight.cli.options import (
    PATH,
    given_options,
    module_option,
    options_as_typed,
    script_argument,
    slurm_option,
    slurm_script_option,
    with_settings,
)
from backlight.terminal import write

if TYPE_CHECKING:
    from backlight.session.script_watch import ScriptWatch
    from backlight.session.watch import Watch


@command(
    "run", "backlight run train.py --lr 0.1", "backlight run -m package.train",
    "backlight run -o runs/first --every 10 train.py --lr 0.1",
    "torchrun --nproc-per-node 2 -m backlight run train.py",
    script=True,
)  # fmt: skip
@script_argument
@click.option("--out", "-o", metavar="DIR", help="Run directory; default runs/<script>-<time>.")
@module_option
@click.option("--config", type=PATH, metavar="FILE", help="TOML file of settings and thresholds.")
@click.option(
    "changes",
    "--set",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other setting, as health.exact_updates=8 (repeatable).",
)
@slurm_option
@slurm_script_option
@with_settings
@click.pass_context
def run(
    context: click.Context,
    /,
    *,
    script: str,
    out: str | None,
    module: bool,
    config: Path | None,
    changes: Sequence[str],
    slurm: Sequence[str],
    slurm_script: Path | None,
    **values: Any,
) -> int:
    """Watch a training script.

    Options after SCRIPT belong to the script. Its exit code, output and signals pass through. Standard error
    gets one line at the start, one for each new error or warning, and all findings at the end.
    """
    from backlight.launch.script import check, launch
    from backlight.session.settings import Settings

    check(script, module=module)
    options = given_options(values, changes)
    arguments = list(context.args)
    folder = None if out is None else Path(out)
    with options_as_typed(context, options):
        settings = Settings.read(config, options) if config is not None else Settings.of(options)
        settings.check_names()
        if slurm or slurm_script is not None:
            return _write_job(context, script, arguments, folder, slurm, slurm_script)
        from backlight.session.script_watch import ScriptWatch

        watched = ScriptWatch(
            settings, folder, script=script, arguments=tuple(arguments),
            reading=_reading(script, module=module),
        )  # fmt: skip
        told = functools.partial(_print_end, watched, script, quiet=settings.quiet)
        after = functools.partial(watched.when_closed, told)
        code = launch(watched, script, arguments, module=module, after=after)
    if watched.watch is not None and watched.watch.stopped_by is not None:
        from backlight.distributed import world
        from backlight.session.stop import exit_code

        return exit_code(world().rank)
    return code


def _reading(script: str, *, module: bool) -> list[dict[str, Any]]:
    """Return what the lines of a script look like, for the findings of the run; nothing of it is printed."""
    from backlight.distributed import world
    from backlight.launch.reading.script_files import read_script

    with contextlib.suppress(Exception):  # the run does without
        return [hint.as_event() for hint in read_script(script, module=module)] if world().rank == 0 else []
    return []


def _print_end(watched: ScriptWatch, script: str, *, quiet: bool) -> None:
    from backlight.distributed import world
    from backlight.generators import kept_random

    with contextlib.suppress(Exception):  # closed or full: Python notices at its end, as without backlight
        sys.stdout.flush()
    if world().rank == 0 and not quiet:  # once for all ranks
        try:
            with kept_random():
                _print_result(watched.watch, script)
        except Exception as error:  # noqa: BLE001 - the exit code is the script's
            write(f"backlight: {type(error).__name__}: {error}", file=sys.stderr)


def _print_result(watch: Watch | None, script: str) -> None:
    from backlight.report.terminal import summary_text
    from backlight.standard_error import write_text
    from backlight.text import as_typed

    if watch is None:
        write(f"backlight: {script} ended without importing torch: no run recorded", file=sys.stderr)
    elif watch.is_recorded:
        write_text(summary_text(watch.path, watch.final_findings, watch.progress), sys.stderr)
    elif watch.removed:
        path = as_typed(watch.path)
        kept = f"{path} is as before" if watch.path.exists() else f"removed {path}"
        write(f"backlight: nothing was measured: {watch.removed}; {kept}", file=sys.stderr)


_HERE_ONLY = frozenset({"slurm", "slurm_script", "out", "script"})


def _write_job(
    context: click.Context,
    target: str,
    arguments: list[str],
    out: Path | None,
    slurm: Sequence[str],
    script: Path | None,
) -> int:
    """Write the batch script of the watched run; return the exit code."""
    from backlight.launch.slurm import Job, batch_script, parameters, script_for, write_script
    from backlight.store.filesystem import file_system_type, is_network_type
    from backlight.store.write.attempt import default_path

    job_options, script = parameters(slurm), script_for(script)
    path = (out if out is not None else default_path(target)).absolute()
    command = ["-m", "backlight", "run", "--out", str(path), *_options(context)]
    job = Job.of(job_options, [*command, target, *arguments], path)
    kind = file_system_type(path)
    if job.nodes > 1 and not is_network_type(kind):
        write(
            f"backlight: {path} is on {kind or 'an unknown file system'}, which other nodes may not see; "
            "ranks that find no run there write a folder of their own, to be joined by `backlight join` "
            "(docs/clusters.md)",
            file=sys.stderr,
        )
    write_script(script, batch_script(job), job.logs)
    write(script)
    return 0


def _options(context: click.Context) -> list[str]:
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
        for item in value if isinstance(value, (list, tuple)) else [value]:
            line += [flag, str(item)]
    return line
