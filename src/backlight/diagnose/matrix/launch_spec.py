"""What a case starts: the command with its placeholders, environment, directory, edits and limit."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backlight.diagnose.matrix.plan import Base
from backlight.diagnose.matrix.plan_errors import near

PLACEHOLDERS = ("python", "run", "case", "ranks")
"""What may stand in braces in a command: the interpreter, the run directory, the case's folder, the ranks."""

_BRACES = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class FileEdit:
    """One change of a configuration file: text found and replaced, or ``value`` put at a dotted ``key``."""

    file: str
    find: str = ""
    replace: str = ""
    key: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that can be started. ``argv`` still holds ``{run}`` and ``{case}``.

    ``source`` is the script that it runs, relative to ``directory``, empty where not known.
    ``branch`` is a commit, branch or tag of the git repository around ``directory``. ``inputs`` are
    digests of the script and of the files that arguments name: a result is stale where they changed.
    """

    argv: tuple[str, ...]
    directory: str
    time_limit: float
    environment: Mapping[str, str]
    unset: tuple[str, ...] = ()
    edits: tuple[FileEdit, ...] = ()
    interpreter: str = ""
    branch: str = ""
    ranks: int = 1
    source: str = ""
    watched: bool = False
    progress: str = ""
    success: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)

    def filled(self, run: Path, case: Path) -> tuple[str, ...]:
        """Return the command with the folders of this attempt put in."""
        values = {"run": str(run), "case": str(case)}
        return tuple(_BRACES.sub(lambda m: values.get(m[1], m[0]), part) for part in self.argv)


def launch_of(
    base: Base, merged: Mapping[str, Any], folder: Path, time_limit: float, *, distributed: bool
) -> Launch:
    """Put together what a case starts.

    With ``distributed`` (some case of the plan has more than one rank) every script is started by
    torchrun, also on one rank: the launcher would otherwise be a second factor.

    Raises
    ------
    ValueError
        If a placeholder is unknown, or if a number of ranks has no place in a command.
    """
    interpreter = _interpreter(merged["interpreter"], folder)
    directory = (folder / (merged["directory"] or ".")).resolve()
    ranks: int = merged["ranks"] or 1
    command: tuple[str, ...] | None = merged["command"]
    values = {"python": interpreter, "ranks": str(ranks)}
    arguments = tuple(_fill(part, values) for part in merged["arguments"])
    if command is not None:
        _check_placeholders(command)
        if merged["ranks"] is not None and not any("{ranks}" in part for part in command):
            raise ValueError("ranks is given, but command has no {ranks} where it would go")
        argv = tuple(_fill(part, values) for part in command) + arguments
    else:
        target = ("-m", merged["module"]) if merged["module"] else (merged["script"],)
        watching = ("-m", "backlight", "run", "--out", "{run}", *base.run_options) if base.watch else ()
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        argv = (interpreter, *(torchrun if distributed else ()), *watching, *target, *arguments)
    return Launch(
        argv=argv,
        directory=str(directory),
        time_limit=time_limit,
        environment=dict(sorted(merged["environment"].items())),
        unset=tuple(sorted(set(merged["unset"]))),
        edits=tuple(
            FileEdit(e.file, e.find or "", e.replace or "", e.key or "", e.value) for e in merged["edits"]
        ),
        interpreter=interpreter,
        branch=merged["branch"] or "",
        ranks=ranks,
        source=merged["script"] or "",
        watched=base.watch if command is None else any("{run}" in part for part in command),
        progress=base.progress or "",
        success=base.success or "",
    )


def _interpreter(given: str | None, folder: Path) -> str:
    if given is None:
        return sys.executable
    # A virtual environment may be named by its folder. Links stay: they are what makes it one.
    place = Path(given).expanduser()
    if "/" in given or place.is_dir():
        place = folder / place
        return str((place / "bin" / "python").absolute() if place.is_dir() else place.absolute())
    return given


def _check_placeholders(command: tuple[str, ...]) -> None:
    for part in command:
        for name in _BRACES.findall(part):
            if name not in PLACEHOLDERS:
                raise ValueError(f"command: unknown placeholder {{{name}}}{near(name, PLACEHOLDERS)}")


def _fill(part: str, values: Mapping[str, str]) -> str:
    return _BRACES.sub(lambda m: values.get(m[1], m[0]), part)
