"""Configuration edits and other branches of the code, in copies: nothing of the user's is touched."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from backlight.diagnose.matrix.launch_spec import FileEdit, Launch
from backlight.diagnose.matrix.plan_errors import PlanError, near

_STYLES: tuple[dict[str, Any], ...] = (
    {"indent": 2},
    {"indent": 4},
    {"indent": "\t"},
    {},
    {"separators": (",", ":")},
)
"""Ways in which people lay out JSON: an edit keeps the one it finds, so that only the value differs."""


def edited(text: str, edit: FileEdit) -> str:
    """Return ``text`` with the edit made.

    Raises
    ------
    PlanError
        If what is to be found is not there exactly once, the key is unknown, or nothing changes.
    """
    if not edit.key:
        count = text.count(edit.find)
        if count != 1:
            raise PlanError(
                f"edits: {edit.find!r} stands {count} times in {edit.file}; expected once: "
                "give more of its line"
            )
        after = text.replace(edit.find, edit.replace)
    else:
        try:
            document = json.loads(text)
        except ValueError as error:
            raise PlanError(f"edits: {edit.file} is not valid JSON: {error}") from None
        style = next((s for s in _STYLES if json.dumps(document, **s) == text.rstrip("\n")), _STYLES[0])
        _put(document, edit)
        ending = "\n" if text.endswith("\n") else ""
        after = text if json.loads(text) == document else json.dumps(document, **style) + ending
    if after == text:
        raise PlanError(
            f"edits: the edit of {edit.file} changes nothing; {edit.key or edit.find!r} is so already"
        )
    return after


def _put(document: Any, edit: FileEdit) -> None:
    parts = edit.key.split(".")
    for position, part in enumerate(parts):
        if not isinstance(document, dict) or part not in document:
            known = document if isinstance(document, dict) else ()
            raise PlanError(
                f"edits: {edit.file} has no key {edit.key!r}: {part!r} is unknown{near(part, known)}"
            )
        if position == len(parts) - 1:
            document[part] = edit.value
        document = document[part]


def named_by(launch: Launch, file: str) -> dict[int, str]:
    """Return the arguments that name ``file``: their position, and what stands before it (``--config=``)."""
    target = (Path(launch.directory) / file).resolve()
    found = {}
    for index, part in enumerate(launch.argv):
        name, equals, value = part.partition("=")
        for before, text in (("", part), (name + equals, value)):
            if text and "\0" not in text and (Path(launch.directory) / text).resolve() == target:
                found[index] = before
                break
    return found


def apply_edits(launch: Launch, argv: tuple[str, ...], directory: Path, case: Path) -> tuple[str, ...]:
    """Make the edits of a launch and return the command that reads them.

    In the tree of a branch, files are edited where they lie. Else each file is copied to
    ``case/edited`` and the arguments that name it are pointed there.
    """
    files = dict.fromkeys(edit.file for edit in launch.edits)
    changed = list(argv)
    for number, file in enumerate(files):
        text = (directory / file).read_text(encoding="utf-8", errors="surrogateescape")
        for edit in launch.edits:
            if edit.file == file:
                text = edited(text, edit)
        target = directory / file
        if not launch.branch:
            target = case / "edited" / f"{number}-{Path(file).name}"
            target.parent.mkdir(exist_ok=True)
            for index, before in named_by(launch, file).items():
                changed[index] = before + str(target)
        target.write_text(text, encoding="utf-8", errors="surrogateescape")
    return tuple(changed)


def export_branch(launch: Launch, commit: str, target: Path) -> Path:
    """Write the files of ``commit`` to ``target``, without touching the repository; return its directory.

    The directory is the one that corresponds to the launch's. A tree that is there already is used
    as it is, because a commit does not change.

    Raises
    ------
    OSError
        If git or the disk fails.
    """
    here = ["git", "-C", launch.directory]
    prefix = subprocess.run(
        [*here, "rev-parse", "--show-prefix"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not target.is_dir():
        top = subprocess.run(
            [*here, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True
        ).stdout.strip()
        done = subprocess.run(
            ["git", "-C", top, "archive", "--format=tar", commit], capture_output=True, check=False
        )
        if done.returncode != 0:
            raise OSError(f"git archive {commit}: {done.stderr.decode(errors='replace').strip()}")
        partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(partial, filter="data")
        partial.replace(target)
    return target / prefix
