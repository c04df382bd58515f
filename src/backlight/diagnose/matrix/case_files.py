"""The files that a case reads: checked before anything runs, edited and exported from git in copies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.plan import Edit, PlanError
from backlight.launch.subprocess import run_in_own_session
from backlight.text import did_you_mean

INTERPRETER_TIMEOUT_S = 60.0
MAX_DIGEST_BYTES = 10 * 1024 * 1024

_INSPECT = """
import importlib.metadata as m, json, platform
found = {"python": platform.python_version()}
for name in ("torch", "backlight", "numpy"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
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
            checked.append(replace(case, inputs=_check(case, interpreters)))
        except PlanError as error:
            raise PlanError(f"{path}: case {case.name!r} cannot start: {error}") from None
    return tuple(checked), interpreters


def _check(case: Case, interpreters: Interpreters) -> dict[str, str]:
    directory, program = Path(case.directory), case.argv[0]
    if not directory.is_dir():
        raise PlanError(f"{directory}: no such directory")
    commit = _commit(case) if case.branch else ""
    search = case.variables(os.environ).get("PATH", os.defpath)
    found = shutil.which(str(directory / program) if "/" in program else program, path=search)
    if found is None and not (commit and program.startswith(".")):
        raise PlanError(f"{program}: no such program in {directory}; expected one that can be executed")
    if case.script:
        _read(case, commit, case.script)
    for edit in case.edits:
        edit_text(_read(case, commit, edit.file), edit)
        if not commit and not _positions(case, edit.file):
            raise PlanError(
                f"edits: no argument of the command names {edit.file!r}, so a changed copy would not be "
                "read; pass it as an argument, or give a branch, whose tree is edited in place"
            )
    if case.interpreter in case.argv and case.interpreter not in interpreters:
        interpreters[case.interpreter] = _inspect(case)
    if "backlight" in case.argv and not interpreters.get(case.interpreter, {}).get("backlight"):
        raise PlanError(
            f"{case.interpreter} has no backlight: install it there, or set watch = false in [base]"
        )
    if commit:
        return {"commit": commit}
    digests = {}
    for name in dict.fromkeys(n for part in case.argv[1:] for n in (part, part.partition("=")[2]) if n):
        file = directory / name
        with contextlib.suppress(OSError, ValueError):
            if file.is_file() and file.stat().st_size <= MAX_DIGEST_BYTES:
                digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return digests


def _inspect(case: Case) -> dict[str, str]:
    try:
        done = run_in_own_session(
            [case.interpreter, "-c", _INSPECT], limit=INTERPRETER_TIMEOUT_S, stdout=PIPE, stderr=PIPE,
            directory=case.directory, environment=case.variables(os.environ),
        )  # fmt: skip
        return {str(k): str(v) for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        raise PlanError(
            f"{case.interpreter}: does not answer as a Python; give another interpreter"
        ) from None


def _git(case: Case, *arguments: str) -> str:
    try:
        done = run_in_own_session(
            ["git", *arguments], limit=None, stdout=PIPE, stderr=PIPE, directory=case.directory
        )
    except OSError:
        raise PlanError(f"branch {case.branch!r}: git is not installed on this machine") from None
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()), "no such commit")
        raise PlanError(f"branch {case.branch!r}: not found in {case.directory}: {reason}")
    return done.stdout


def _commit(case: Case) -> str:
    options = ("--verify", "--quiet", "--end-of-options")
    return _git(case, "rev-parse", *options, f"{case.branch}^{{commit}}").strip()


def _read(case: Case, commit: str, name: str) -> str:
    if commit:
        return _git(case, "show", f"{commit}:./{name}")
    path = Path(case.directory) / name
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
    if edit.key is not None:
        after = _edit_json(text, edit.file, edit.key, edit.value)
    else:
        find = edit.find or ""
        if text.count(find) != 1:
            raise PlanError(
                f"edits: {find!r} occurs {text.count(find)} times in {edit.file}; expected once: "
                "give more of its line"
            )
        after = text.replace(find, edit.replace or "")
    if after == text:
        raise PlanError(
            f"edits: the edit of {edit.file} changes nothing; {edit.key or edit.find!r} is set already"
        )
    return after


def _edit_json(text: str, file: str, key: str, value: Any) -> str:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise PlanError(f"edits: {file} is not valid JSON: {error}") from None
    table, inner = document, document
    for part in key.split("."):
        table = inner
        if not isinstance(table, dict) or part not in table:
            hint = did_you_mean(part, table if isinstance(table, dict) else ())
            raise PlanError(f"edits: {file} has no key {key!r}: {part!r} is unknown{hint}")
        inner = table[part]
    if inner == value:
        return text
    table[part] = value
    indent = re.search(r"\n([ \t]+)", text)
    return json.dumps(document, indent=indent[1] if indent else None) + "\n" * text.endswith("\n")


def _positions(case: Case, file: str) -> dict[int, str]:
    """Return the positions of the arguments that name ``file``, with what precedes it (``--config=``)."""
    target = (Path(case.directory) / file).resolve()
    found = {}
    for index, part in enumerate(case.argv):
        name, equals, value = part.partition("=")
        for before, text in (("", part), (name + equals, value)):
            if text and "\0" not in text and (Path(case.directory) / text).resolve() == target:
                found[index] = before
    return found


def prepare_files(case: Case, argv: Sequence[str], attempt: Path) -> tuple[Path, list[str]]:
    """Export the branch and make the edits of a case; return its directory and its command.

    In the tree of a branch, files are edited in place; an edited tree belongs to one attempt alone. Otherwise
    files are copied to ``attempt/edited`` and the arguments that name them are redirected.
    """
    directory = Path(case.directory)
    if case.branch:
        commit = _commit(case)
        tree = attempt / "tree" if case.edits else attempt.parents[2] / "trees" / commit
        top, prefix = _git(case, "rev-parse", "--show-toplevel", "--show-prefix").splitlines()
        if not tree.is_dir():
            _export(case, top, commit, tree)
        directory = tree / prefix
    changed = list(argv)
    for number, file in enumerate(dict.fromkeys(edit.file for edit in case.edits)):
        text = (directory / file).read_text(encoding="utf-8", errors="surrogateescape")
        for edit in case.edits:
            text = edit_text(text, edit) if edit.file == file else text
        target = directory / file
        if not case.branch:
            target = attempt / "edited" / f"{number}-{Path(file).name}"
            target.parent.mkdir(exist_ok=True)
            for index, before in _positions(case, file).items():
                changed[index] = before + str(target)
        target.write_text(text, encoding="utf-8", errors="surrogateescape")
    return directory, changed


def _export(case: Case, top: str, commit: str, target: Path) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    packed = partial / "export.tar"
    _git(case, "-C", top, "archive", "--format=tar", f"--output={packed}", commit)
    with tarfile.open(packed) as archive:
        packed.unlink()
        archive.extractall(partial, filter="data")
    partial.replace(target)
