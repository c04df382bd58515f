"""Options and arguments that several commands share, and the values that they take."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from backlight.settings import (
    MONITOR_SETTINGS,
    SettingError,
    assigned,
    built_in_settings,
    options_of,
    type_of,
)
from backlight.settings import Option as Setting
from backlight.terminal import write
from backlight.text import did_you_mean

if TYPE_CHECKING:
    from backlight.store.read.remote import Mirror

_mirrors: list[Mirror] = []  # they last as long as the process


def readable_run(text: str, is_needed: Callable[[PurePosixPath], bool] = lambda _: True) -> Path:
    """Return the directory of a run to read; behind a URL, of its needed copy, or a RunFormatError."""
    if "://" not in str(text):  # a default is a Path already
        return Path(text)
    from backlight.store.read.remote import Mirror, is_url

    if not is_url(text):
        return Path(text)
    _mirrors.append(Mirror(text, is_needed))
    return _mirrors[-1].folder


def own_run(text: str) -> Path:
    """Return the directory of a run that a command changes; a URL is a ValueError."""
    if "://" in text:
        raise ValueError(f"{text}: only a run on this machine can be changed; copy it here first")
    return Path(text)


PATH: Any = click.Path(path_type=Path)

run_argument = click.argument("path", metavar="RUN", type=own_run, help="Run directory.")
run_or_latest = click.argument(
    "path", metavar="[RUN]", required=False, type=readable_run,
    help="Run directory or URL; default: the latest in runs/.",
)  # fmt: skip
script_argument = click.argument("script", metavar="SCRIPT", help="Training script; with -m, a module.")
module_option = click.option("module", "-m", is_flag=True, help="Run SCRIPT as a module, as python -m does.")
Annotation = Literal["github", "junit", "sarif"]

format_option = click.option(
    "annotation", "--format", type=click.Choice(get_args(Annotation)), metavar="NAME",
    help="Annotations of a CI job: github, junit or sarif.",
)  # fmt: skip
json_option = click.option("as_json", "--json", is_flag=True, help="Print JSON.")
script_json_option = click.option(
    "as_json", "--json", is_flag=True, help="Print JSON; the output of the script goes to standard error."
)
full_option = click.option("--full", is_flag=True, help="Print all rows and names, not only the first.")
tables_option = click.option("--full", is_flag=True, help="Print all tables, not the verdict alone.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing file.")
raw_option = click.option("--raw", is_flag=True, help="Leave CSV texts that look like formulas as they are.")
store_option = click.option(
    "--out", "-o", metavar="DIR", type=PATH, help="Run directory to store the result in."
)
slurm_option = click.option(
    "--slurm", metavar="KEY=VALUE", multiple=True,
    help="Slurm option of --slurm-script, as nodes=2 (repeatable).",
)  # fmt: skip
slurm_script_option = click.option(
    "--slurm-script", metavar="FILE", type=PATH, help="Write a batch script for sbatch instead of running."
)
ray_option = click.option(
    "--ray", metavar="KEY=VALUE", multiple=True,
    help="Run on Ray: cpus=4, gpus=1, address=auto (repeatable).",
)  # fmt: skip

# Of the configuration of an experiment
preset_option = click.option("--preset", metavar="NAME", help="Preset: ci (default, up to minutes) or paper.")
changes_option = click.option(
    "changes", "--set", metavar="KEY=VALUE", multiple=True,
    help="Configuration key, as training.lr=0.001 (repeatable).",
)  # fmt: skip
seed_option = click.option("--seed", metavar="N", type=int, help="Seed of data, weights and batches.")

RUNS = Path("runs")
"""Where runs are recorded by default."""

_SEPARATOR = "__"
"""Between monitor and field in the name of a parameter."""


def _flagged() -> Iterator[tuple[str, Any, str, Setting]]:
    """Yield name, class, field and option of each setting that has an option of its own."""
    from backlight.session.settings import Settings

    kinds = {"": Settings, **{name: MONITOR_SETTINGS[name] for name in built_in_settings()}}
    for monitor, kind in kinds.items():
        for field, setting in options_of(kind).items():
            if setting.flags:
                yield f"{monitor}.{field}" if monitor else field, kind, field, setting


def with_settings(function: Callable[..., int]) -> Callable[..., int]:
    """Return a command that has an option for each setting with flags, in its ``**values``."""
    for name, kind, field, setting in reversed(list(_flagged())):
        hint = type_of(kind, field)
        number = next((each for each in (int, float) if each in {hint, *get_args(hint)}), str)
        is_flag = hint is bool
        function = click.option(
            name.replace(".", _SEPARATOR), *setting.flags, is_flag=is_flag,
            type=None if is_flag else str if setting.parse is not None else number,
            multiple=setting.repeatable, metavar=setting.metavar or None,
            help=f"{setting.help[:-1]} (repeatable)." if setting.repeatable else setting.help,
        )(function)  # fmt: skip
    return function


def given_options(values: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return the settings that were given, of a monitor in a mapping; ValueError for a bad ``--set``."""
    options = assigned(changes)
    for name, value in values.items():
        if value is not None and value is not False and value != ():
            monitor, _, field = name.rpartition(_SEPARATOR)
            target = options.setdefault(monitor, {}) if monitor else options
            target[field] = value
    return options


@contextlib.contextmanager
def options_as_typed(context: click.Context, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn a SettingError into a ValueError that calls settings of the command line by their options."""
    config = context.params.get("config")
    flags = {name: setting.flags[0] for name, _, _, setting in _flagged()}
    try:
        yield
    except SettingError as error:
        monitor, _, field = error.setting.rpartition(".")
        from_file = config is not None and field not in (options.get(monitor, ()) if monitor else options)

        def typed(name: str) -> str:
            return name if from_file else flags.get(name, f"--set {name}")

        raise ValueError(f"{config}: {error.worded(typed)}" if from_file else error.worded(typed)) from None


def parse_fail_on(text: str | None, allowed: Collection[str]) -> frozenset[str]:
    """Return the names of a ``--fail-on``: all for ``any``, none for None; ValueError for an unknown one."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in {*allowed, "any"}:
            hint = did_you_mean(name, ["any", *allowed])
            raise ValueError(f"--fail-on {name!r}: no such name{hint}")
    return frozenset(allowed) if "any" in names else frozenset(names)


def given_or_latest(run: Path | None) -> Path:
    """Return the run that was given, else the latest in ``runs``, named on stderr; NoRunError for none."""
    if run is not None:
        return run
    from backlight.store.read.run_list import latest_run

    latest = latest_run(RUNS)
    write(f"backlight: {latest}, the latest run", file=sys.stderr)
    return latest
