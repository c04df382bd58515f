"""The folder of a matrix: what was started, what was seen, and what is still to run.

::

    matrix.json              the report, rewritten after every case
    plan.toml                the plan as it was
    trees/COMMIT/            the files of a branch
    cases/NAME/000/          one attempt; a case that runs again gets the next number
        start.json  result.json  stdout.txt  stderr.txt  evidence/  run/  edited/
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backlight.diagnose.matrix import processes
from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.observations import Kept, Observation
from backlight.diagnose.matrix.processes import MARK
from backlight.records import to_json

FORMAT = 1
"""Version of the files in the folder."""

REPORT = "matrix.json"


class MatrixFolderError(ValueError):
    """A folder that holds no matrix, or one that cannot be used now."""


@dataclass(frozen=True)
class Attempt:
    """One start of a case; ``root`` is the folder of the matrix."""

    root: Path
    path: Path

    @property
    def run(self) -> Path:
        """The run directory that a watched case writes."""
        return self.path / "run"

    @property
    def stdout(self) -> Path:
        """What the case printed."""
        return self.path / "stdout.txt"

    @property
    def stderr(self) -> Path:
        """What the case printed to standard error."""
        return self.path / "stderr.txt"

    def begin(self, argv: Sequence[str], directory: str, mark: str) -> None:
        """Record what is about to be started and how its processes are known."""
        write_json(
            self.path / "start.json",
            {"argv": argv, "directory": directory, "mark": mark, "time": time.time()},
        )

    def outputs(self) -> tuple[Kept, ...]:
        """Return the files that every attempt has."""
        kept = [
            (self.path / "start.json", "what was started"),
            (self.stdout, "output"),
            (self.stderr, "errors"),
        ]
        kept.append((self.run, "run directory"))
        return tuple(Kept(p.relative_to(self.root).as_posix(), what) for p, what in kept if p.exists())

    def finish(self, case: Case, observation: Observation) -> None:
        """Store what was seen; the case counts as done from here on."""
        document = {"format": FORMAT, "digest": case.digest, "observation": to_json(observation)}
        write_json(self.path / "result.json", document)


class MatrixFolder:
    """The folder of one matrix, made where it is not there; only one process works in it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def held(self, plan: Path) -> Iterator[None]:
        """Keep other matrices out of the folder; processes that a killed one left running are ended.

        Raises
        ------
        MatrixFolderError
            If the folder holds something else, or another matrix runs in it.
        """
        foreign = self.path.exists() and not (self.path / "plan.toml").is_file()
        if foreign and (not self.path.is_dir() or any(self.path.iterdir())):
            raise MatrixFolderError(f"{self.path}: holds something that is no matrix; choose another --out")
        (self.path / "cases").mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise MatrixFolderError(
                    f"{self.path}: another matrix is running in it; wait, or choose --out"
                ) from None
            _replace(self.path / "plan.toml", plan.read_bytes())
            self._end_leftovers()
            yield
        finally:
            os.close(descriptor)

    def attempts(self, name: str) -> list[Attempt]:
        """Return the attempts of a case, oldest first."""
        folder = self.path / "cases" / name
        found = sorted(e for e in folder.iterdir() if e.name.isdigit()) if folder.is_dir() else []
        return [Attempt(self.path, entry) for entry in found]

    def done(self, case: Case) -> tuple[Attempt, Observation] | None:
        """Return the last attempt of ``case`` that has a result of this very launch, None without one."""
        for attempt in reversed(self.attempts(case.name)):
            document = _result(attempt)
            if document is not None and document["digest"] == case.digest:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    return attempt, Observation.from_json(document["observation"])
        return None

    def new_attempt(self, case: Case) -> Attempt:
        """Make the folder of the next attempt of a case."""
        number = max((int(a.path.name) for a in self.attempts(case.name)), default=-1) + 1
        path = self.path / "cases" / case.name / f"{number:03d}"
        path.mkdir(parents=True)
        return Attempt(self.path, path)

    def _end_leftovers(self) -> None:
        marks = set()
        for start in self.path.glob("cases/*/*/start.json"):
            if not (start.parent / "result.json").exists():
                with contextlib.suppress(OSError, ValueError, KeyError):
                    marks.add(json.loads(start.read_bytes())["mark"])
        if not marks:
            return
        for process in processes.table().values():
            mark = processes.environment_of(process.pid).get(MARK)
            if mark in marks:
                processes.Tree(process.pid, str(mark)).end(grace=1.0)


def _result(attempt: Attempt) -> dict[str, Any] | None:
    try:
        document = json.loads((attempt.path / "result.json").read_bytes())
    except (OSError, ValueError):
        return None
    valid = isinstance(document, dict) and document.get("format") == FORMAT and "digest" in document
    return document if valid else None


def is_matrix(path: Path) -> bool:
    """Tell whether ``path`` is the folder of a matrix that has something to report."""
    return (path / REPORT).is_file() and (path / "plan.toml").is_file()


def write_json(path: Path, document: Any) -> None:
    """Write a document whole or not at all; an OSError passes through."""
    _replace(path, (json.dumps(to_json(document), indent=2, ensure_ascii=True) + "\n").encode())


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
