"""Options and arguments that several commands share, and the values that they take."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer import Argument, Context, Option

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
    """Return the directory of a run that a command reads; behind a URL, of its copy with what is needed.

    Raises
    ------
    RunFormatError
        If the URL cannot be read, or a package for it is missing.
    """
    if "://" not in str(text):  # a default is a Path already
        return Path(text)
    from backlight.store.read.remote import Mirror, is_url

    if not is_url(text):
        return Path(text)
    _mirrors.append(Mirror(text, is_needed))
    return _mirrors[-1].folder


def own_run(text: str) -> Path:
    """Return the directory of a run that a command changes.

    Raises
    ------
    ValueError
        If it is a URL.
    """
    if "://" in text:
        raise ValueError(f"{text}: only a run on this machine can be changed; copy it here first")
    return Path(text)


Run = Annotated[Path, Argument(metavar="RUN", help="Run directory.", parser=own_run)]
RunOrLatest = Annotated[
    Path | None,
    Argument(metavar="RUN", help="Run directory or URL; default: the latest in runs/.", parser=readable_run),
]
Script = Annotated[str, Argument(metavar="SCRIPT", help="Training script; with -m, a module.")]
Module = Annotated[bool, Option("-m", help="Run SCRIPT as a module, as python -m does.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
ScriptJson = Annotated[
    bool, Option("--json", help="Print JSON; the output of the script goes to standard error.")
]
Full = Annotated[bool, Option("--full", help="Print all rows and names, not only the first.")]
Tables = Annotated[bool, Option("--full", help="Print all tables, not the verdict alone.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an existing file.")]
StoreIn = Annotated[
    Path | None, Option("--out", "-o", metavar="DIR", help="Run directory to store the result in.")
]
Slurm = Annotated[
    list[str] | None,
    Option("--slurm", metavar="KEY=VALUE", help="Slurm option of --slurm-script, as nodes=2 (repeatable)."),
]
SlurmScript = Annotated[
    Path | None,
    Option("--slurm-script", metavar="FILE", help="Write a batch script for sbatch instead of running."),
]
Ray = Annotated[
    list[str] | None,
    Option("--ray", metavar="KEY=VALUE", help="Run on Ray: cpus=4, gpus=1, address=auto (repeatable)."),
]

# Of the configuration of an experiment
Preset = Annotated[
    str | None, Option("--preset", metavar="NAME", help="Preset: ci (default, up to minutes) or paper.")
]
Changes = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Configuration key, as training.lr=0.001 (repeatable)."),
]
Steps = Annotated[int | None, Option("--steps", min=1, help="Optimizer steps after which the run is ended.")]
Seed = Annotated[int | None, Option("--seed", help="Seed of data, weights and batches.")]
Device = Annotated[str | None, Option("--device", metavar="NAME", help="Device, as cpu, cuda or cuda:1.")]

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
    """Return a command that has an option for each setting with flags, in place of ``**values``."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, kind, field, setting in _flagged():
        hint = type_of(kind, field)
        number = next((each for each in (int, float) if each in {hint, *get_args(hint)}), str)
        value: Any = bool if hint is bool else str if setting.parse is not None else number
        if setting.repeatable:
            value = list[number]  # type: ignore[valid-type]  # the type of an item
        text = f"{setting.help[:-1]} (repeatable)." if setting.repeatable else setting.help
        option = Option(*setting.flags, metavar=setting.metavar or None, help=text)
        annotation = value if hint is bool else value | None
        parameters.append(
            inspect.Parameter(
                name.replace(".", _SEPARATOR),
                inspect.Parameter.KEYWORD_ONLY,
                default=False if hint is bool else None,
                annotation=Annotated[annotation, option],
            )
        )

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> int:
        return function(*args, **kwargs)

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del command.__wrapped__  # its annotations would be read
    return command


def given_options(values: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return the settings that were given, those of a monitor in a mapping of its own.

    Raises
    ------
    ValueError
        If an item of ``--set`` has another form.
    """
    given = assigned(changes)
    for name, value in values.items():
        if value is not None and value is not False and value != []:
            monitor, _, field = name.rpartition(_SEPARATOR)
            target = given.setdefault(monitor, {}) if monitor else given
            target[field] = value
    return given


@contextlib.contextmanager
def options_as_typed(context: Context, given: Mapping[str, Any]) -> Iterator[None]:
    """Reword errors of settings: those ``given`` on the command line are called by their options.

    Raises
    ------
    ValueError
        In place of a SettingError; the settings of a file keep the names of its keys.
    """
    config = context.params.get("config")
    flags = {name: setting.flags[0] for name, _, _, setting in _flagged()}
    try:
        yield
    except SettingError as error:
        monitor, _, field = error.setting.rpartition(".")
        from_file = config is not None and field not in (given.get(monitor, ()) if monitor else given)

        def typed(name: str) -> str:
            return name if from_file else flags.get(name, f"--set {name}")

        raise ValueError(f"{config}: {error.worded(typed)}" if from_file else error.worded(typed)) from None


def parse_fail_on(text: str | None, known: Collection[str]) -> frozenset[str]:
    """Return the names of a ``--fail-on`` other than that of findings; ``any`` is all of them, None is none.

    Raises
    ------
    ValueError
        If a name is not one of ``known``.
    """
    names = [] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in {*known, "any"}:
            hint = did_you_mean(name, ["any", *known])
            raise ValueError(f"--fail-on {name!r}: no such name{hint}")
    return frozenset(known) if "any" in names else frozenset(names)


def given_or_latest(run: Path | None) -> Path:
    """Return the run that was given, else the one in ``runs`` that was started last, named on stderr.

    Raises
    ------
    NoRunError
        If none was given and there is none.
    """
    if run is not None:
        return run
    from backlight.store.read.run_list import latest_run

    found = latest_run(RUNS)
    write(f"backlight: {found}, the latest run", file=sys.stderr)
    return found
