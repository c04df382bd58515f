"""The files that a case reads: checked before anything runs, edited and exported from git in copies."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backlight.diagnose.matrix.cases import Case, Launch
from backlight.diagnose.matrix.plan import Edit, PlanError
from backlight.text import did_you_mean

INTERPRETER_TIMEOUT_S = 60.0
MAX_DIGEST_BYTES = 10 * 1024 * 1024

_INSPECT = """
import importlib.metadata as m, json, platform
found = {d.metadata["Name"]: d.version for d in m.distributions()}
print(json.dumps({"python": platform.python_version(),
                  **{n: found[n] for n in ("torch", "backlight", "numpy") if n in found}}))
"""

Interpreters = dict[str, dict[str, str]]
"""Versions of Python and packages by interpreter."""


def check_cases(cases: Sequence[Case], path: Path) -> tuple[tuple[Case, ...], Interpreters]:
    """Return the cases with the digests of what they read, and the interpreters that they need.

    Raises
    ------
    PlanError
        At the first command, script, directory, branch, edit or interpreter that does not exist.
    """
    interpreters: Interpreters = {}
    checked = []
    for case in cases:
        try:
            inputs = _check(case.launch, interpreters)
        except PlanError as error:
            raise PlanError(f"{path}: case {case.name!r} cannot start: {error}") from None
        checked.append(replace(case, launch=replace(case.launch, inputs=inputs)))
    return tuple(checked), interpreters


def _check(launch: Launch, interpreters: Interpreters) -> dict[str, str]:
    directory, program = Path(launch.directory), launch.argv[0]
    if not directory.is_dir():
        raise PlanError(f"{directory}: no such directory")
    commit = resolve_branch(directory, launch.branch) if launch.branch else ""
    search = launch.variables(os.environ).get("PATH", os.defpath)
    found = shutil.which(str(directory / program) if "/" in program else program, path=search)
    if found is None and not (commit and program.startswith(".")):
        raise PlanError(f"{program}: no such program in {directory}; expected one that can be executed")
    if launch.source:
        _read(launch, commit, launch.source)
    for edit in launch.edits:
        edit_text(_read(launch, commit, edit.file), edit)
        if not commit and not _positions(launch, edit.file):
            raise PlanError(
                f"edits: no argument of the command names {edit.file!r}, so a changed copy would not be "
                "read; pass it as an argument, or give a branch, whose tree is edited in place"
            )
    if launch.interpreter in launch.argv and launch.interpreter not in interpreters:
        interpreters[launch.interpreter] = _inspect(launch)
    if "backlight" in launch.argv and not interpreters.get(launch.interpreter, {}).get("backlight"):
        raise PlanError(
            f"{launch.interpreter} has no backlight: install it there, or set watch = false in [base]"
        )
    if commit:
        return {"commit": commit}
    digests = {}
    for name in dict.fromkeys(n for part in launch.argv[1:] for n in (part, part.partition("=")[2]) if n):
        file = directory / name
        with contextlib.suppress(OSError, ValueError):
            if file.is_file() and file.stat().st_size <= MAX_DIGEST_BYTES:
                digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return digests


def _inspect(launch: Launch) -> dict[str, str]:
    try:
        done = subprocess.run(
            [launch.interpreter, "-c", _INSPECT], cwd=launch.directory, env=launch.variables(os.environ),
            capture_output=True, text=True, timeout=INTERPRETER_TIMEOUT_S, check=False,
        )  # fmt: skip
        return {str(k): str(v) for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        raise PlanError(
            f"{launch.interpreter}: does not answer as a Python; give another interpreter"
        ) from None


def _git(directory: str | Path, *arguments: str, what: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, check=False)
    except OSError:
        raise PlanError(f"branch {what!r}: git is not installed on this machine") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise PlanError(
            f"branch {what!r}: not found in {directory}: {reason[0] if reason else 'no such commit'}"
        )
    return done.stdout


def resolve_branch(directory: Path, branch: str) -> str:
    """Return the commit of ``branch`` in the repository around ``directory``.

    A PlanError passes through where git, the repository or the commit does not exist.
    """
    options = ("--verify", "--quiet", "--end-of-options")
    return _git(directory, "rev-parse", *options, f"{branch}^{{commit}}", what=branch).decode().strip()


def _prefix(launch: Launch) -> str:
    return _git(launch.directory, "rev-parse", "--show-prefix", what=launch.branch).decode().strip()


def _read(launch: Launch, commit: str, name: str) -> str:
    if commit:
        what = f"{launch.branch}:{name}"
        found = _git(launch.directory, "show", f"{commit}:{_prefix(launch)}{name}", what=what)
        return found.decode(errors="surrogateescape")
    path = Path(launch.directory) / name
    if (path / "__main__.py").is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None


def edit_text(text: str, edit: Edit) -> str:
    """Return ``text`` with the edit made.

    Raises
    ------
    PlanError
        If the text is not found exactly once, the key is unknown, or nothing changes.
    """
    if edit.key is None:
        find = edit.find or ""
        if text.count(find) != 1:
            raise PlanError(
                f"edits: {find!r} occurs {text.count(find)} times in {edit.file}; expected once: "
                "give more of its line"
            )
        after = text.replace(find, edit.replace or "")
    else:
        try:
            document = json.loads(text)
        except ValueError as error:
            raise PlanError(f"edits: {edit.file} is not valid JSON: {error}") from None
        indent = re.search(r"\n([ \t]+)", text)
        _put(document, edit)
        changed = json.dumps(document, indent=indent[1] if indent else None) + "\n" * text.endswith("\n")
        after = text if json.loads(text) == document else changed
    if after == text:
        raise PlanError(
            f"edits: the edit of {edit.file} changes nothing; {edit.key or edit.find!r} is set already"
        )
    return after


def _put(document: Any, edit: Edit) -> None:
    parts = (edit.key or "").split(".")
    for position, part in enumerate(parts):
        if not isinstance(document, dict) or part not in document:
            hint = did_you_mean(part, document if isinstance(document, dict) else ())
            raise PlanError(f"edits: {edit.file} has no key {edit.key!r}: {part!r} is unknown{hint}")
        if position == len(parts) - 1:
            document[part] = edit.value
        document = document[part]


def _positions(launch: Launch, file: str) -> dict[int, str]:
    """Return the positions of the arguments that name ``file``, with what precedes it (``--config=``)."""
    target = (Path(launch.directory) / file).resolve()
    found = {}
    for index, part in enumerate(launch.argv):
        name, equals, value = part.partition("=")
        for before, text in (("", part), (name + equals, value)):
            if text and "\0" not in text and (Path(launch.directory) / text).resolve() == target:
                found[index] = before
    return found


def prepare_files(launch: Launch, argv: tuple[str, ...], attempt: Path) -> tuple[Path, tuple[str, ...]]:
    """Export the branch and make the edits of a launch; return its directory and its command.

    In the tree of a branch, files are edited in place; an edited tree belongs to one attempt alone. Otherwise
    files are copied to ``attempt/edited`` and the arguments that name them are redirected.
    """
    directory = Path(launch.directory)
    if launch.branch:
        commit = resolve_branch(directory, launch.branch)
        trees = attempt.parents[2] / "trees"
        target = attempt / "tree" if launch.edits else trees / commit
        if not target.is_dir():
            _export(launch, commit, target)
        directory = target / _prefix(launch)
    changed = list(argv)
    for number, file in enumerate(dict.fromkeys(edit.file for edit in launch.edits)):
        text = (directory / file).read_text(encoding="utf-8", errors="surrogateescape")
        for edit in launch.edits:
            text = edit_text(text, edit) if edit.file == file else text
        target = directory / file
        if not launch.branch:
            target = attempt / "edited" / f"{number}-{Path(file).name}"
            target.parent.mkdir(exist_ok=True)
            for index, before in _positions(launch, file).items():
                changed[index] = before + str(target)
        target.write_text(text, encoding="utf-8", errors="surrogateescape")
    return directory, tuple(changed)


def _export(launch: Launch, commit: str, target: Path) -> None:
    top = _git(launch.directory, "rev-parse", "--show-toplevel", what=launch.branch).decode().strip()
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    archived = _git(top, "archive", "--format=tar", commit, what=launch.branch)
    with tarfile.open(fileobj=io.BytesIO(archived)) as archive:
        archive.extractall(partial, filter="data")
    partial.replace(target)
