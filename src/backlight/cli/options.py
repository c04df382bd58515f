"""Options and arguments that several commands share, and the values that they take."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from backlight.setting_error import SettingError
from backlight.terminal import write
from backlight.text import assignments, did_you_mean

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

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str, where: str) -> int:
    """Return bytes from ``"500M"``, ``"2.5G"`` or ``"1000000"``; K, M, G, T are powers of 1000.

    Raises
    ------
    ValueError
        If the text is not a positive size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * _FACTORS[found[2].upper()]) if found else 0
    if size <= 0:
        raise ValueError(f"{where} {text!r}: expected a size such as 500M or 2G")
    return size


def parse_groups(items: Iterable[str]) -> dict[str, str]:
    """Return patterns by group name from ``NAME=PATTERN`` items.

    Raises
    ------
    ValueError
        If an item has another form, or a name comes twice.
    """
    return assignments(items, "--group", "NAME=PATTERN, such as --group host='encoder.*'")


OPTION_OF = {"groups": "--group", "trackers": "--tracker"}
"""Options of settings that have another name."""


@contextlib.contextmanager
def options_as_typed(context: Context, given: Collection[str]) -> Iterator[None]:
    """Reword errors of settings: those ``given`` on the command line are called by their options.

    Raises
    ------
    ValueError
        In place of a SettingError; the settings of a file keep the names of its keys.
    """
    options = {p.name: p.opts[0] for p in context.command.params if p.param_type_name == "option"} | OPTION_OF
    config = context.params.get("config")
    try:
        yield
    except SettingError as error:
        from_file = config is not None and error.setting not in given
        line = error.worded(lambda name: name if from_file else options.get(name, name))
        raise ValueError(f"{config}: {line}" if from_file else line) from None


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
