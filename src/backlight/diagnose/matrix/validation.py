"""Can every case start? Asked before anything is written, so that a plan fails whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.edits import edited, named_by
from backlight.diagnose.matrix.launch_spec import Launch
from backlight.diagnose.matrix.plan_errors import PlanError

PATIENCE = 60.0
"""Seconds that an interpreter may take to say what it is."""

_LARGEST_INPUT = 10 * 1024 * 1024

_INSPECT = """
import importlib.metadata as m, json, platform, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
print(json.dumps({"python": platform.python_version(), "executable": sys.executable,
                  **{n: version(n) for n in ("torch", "backlight", "numpy")}}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What an interpreter says of itself; a version is empty where the package is not installed."""

    path: str
    versions: Mapping[str, str] = field(default_factory=dict)


def check_cases(cases: Sequence[Case], path: Path) -> tuple[tuple[Case, ...], tuple[Interpreter, ...]]:
    """Check that every case can start; ``path`` is the plan, for messages.

    Returns
    -------
    tuple[tuple[Case, ...], tuple[Interpreter, ...]]
        The cases with the digests of what they read, and the interpreters that they need.

    Raises
    ------
    PlanError
        At the first command, script, directory, branch, file to edit or interpreter that is not there.
    """
    found: dict[str, Interpreter] = {}
    pinned = []
    for case in cases:
        try:
            inputs = _check(case.launch, found)
        except PlanError as error:
            raise PlanError(f"{path}: case {case.name!r} cannot start: {error}") from None
        pinned.append(dataclasses.replace(case, launch=dataclasses.replace(case.launch, inputs=inputs)))
    return tuple(pinned), tuple(found.values())


def _check(launch: Launch, found: dict[str, Interpreter]) -> dict[str, str]:
    directory = Path(launch.directory)
    if not directory.is_dir():
        raise PlanError(f"{directory}: no such directory")
    commit = resolve_branch(directory, launch.branch) if launch.branch else ""
    program = program_of(launch)
    if program is None and not (commit and (launch.argv[0].startswith("."))):
        raise PlanError(
            f"{launch.argv[0]}: no such program, seen from {directory}; expected one that can be executed"
        )
    if launch.source:
        _read(launch, commit, launch.source)
    for edit in launch.edits:
        text = _read(launch, commit, edit.file)
        edited(text, edit)
        if not commit and not named_by(launch, edit.file):
            raise PlanError(
                f"edits: no argument of the command names {edit.file!r}, so a changed copy would not be "
                "read; pass it as an argument, or give a branch, whose tree is edited in place"
            )
    if launch.interpreter in launch.argv and launch.interpreter not in found:
        found[launch.interpreter] = _inspect(launch)
    known = found.get(launch.interpreter)
    if known and "backlight" in launch.argv and not known.versions.get("backlight"):
        raise PlanError(
            f"{launch.interpreter} has no backlight: install it there, or set watch = false in [base]"
        )
    return {"commit": commit} if commit else _digests(launch)


def _digests(launch: Launch) -> dict[str, str]:
    """Return digests of the files that the command names, the script among them; large ones are left out."""
    found = {}
    for part in launch.argv[1:]:
        for name in dict.fromkeys((part, part.partition("=")[2])):
            place = Path(launch.directory) / name
            with contextlib.suppress(OSError, ValueError):
                if name and place.is_file() and place.stat().st_size <= _LARGEST_INPUT:
                    found[name] = hashlib.sha256(place.read_bytes()).hexdigest()[:16]
    return found


def program_of(launch: Launch) -> str | None:
    """Return the program that a launch starts, as the system would find it, None where there is none."""
    search = {**os.environ, **launch.environment}.get("PATH", os.defpath)
    name = launch.argv[0]
    return shutil.which(str(Path(launch.directory) / name) if "/" in name else name, path=search)


def resolve_branch(directory: Path, branch: str) -> str:
    """Return the commit that ``branch`` names in the repository around ``directory``.

    Raises
    ------
    PlanError
        If there is no git, no repository, or no such commit.
    """
    return _git(
        directory, "rev-parse", "--verify", "--quiet", "--end-of-options", branch + "^{commit}", what=branch
    )


def _git(directory: Path, *arguments: str, what: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        raise PlanError(f"branch {what!r}: there is no git on this machine") from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()
        raise PlanError(
            f"branch {what!r}: not found in {directory}: {reason[0] if reason else 'no such commit'}"
        )
    return done.stdout.strip()


def _read(launch: Launch, commit: str, name: str) -> str:
    directory = Path(launch.directory)
    if commit:
        prefix = _git(directory, "rev-parse", "--show-prefix", what=launch.branch)
        return _git(directory, "show", f"{commit}:{prefix}{name}", what=f"{launch.branch}:{name}")
    place = directory / name
    if place.is_dir() and (place / "__main__.py").is_file():
        return ""
    try:
        return place.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise PlanError(f"{place}: {error.strerror or error}") from None


def _inspect(launch: Launch) -> Interpreter:
    environment = {k: v for k, v in {**os.environ, **launch.environment}.items() if k not in launch.unset}
    try:
        done = subprocess.run(
            [launch.interpreter, "-c", _INSPECT], cwd=launch.directory, env=environment,
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        versions = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        raise PlanError(
            f"{launch.interpreter}: does not answer as a Python; name one with interpreter"
        ) from None
    return Interpreter(launch.interpreter, {str(k): str(v) for k, v in versions.items()})
