"""What was observed of each case, as frozen records, and the directory that holds them.

::

    matrix.json              the report, rewritten after every case
    plan.toml                the plan as it was
    trees/COMMIT/            the files of a branch
    cases/NAME/000/          one attempt; a case that runs again gets the next number
        start.json  result.json  stdout.txt  stderr.txt  evidence/  run/  edited/
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import filelock
from pydantic import TypeAdapter, ValidationError

from backlight.diagnose.matrix.cases import Case
from backlight.launch.subprocess import end_marked
from backlight.records import DiagnosisKind

FORMAT = 2
REPORT = "matrix.json"


class MatrixDirectoryError(ValueError):
    """A directory that holds no matrix, or one that cannot be used now."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process when the time of its case was over, with the diagnosis of the stall monitor.

    ``cpu`` and ``delay`` (running and queued for a core) are in cores, over the last half of the window.
    ``leaf``: it has no children. ``spins``: it held the interpreter lock on one line in every sample.
    """

    pid: int
    command: str
    leaf: bool
    cpu: float
    delay: float = 0.0
    verdict: DiagnosisKind = DiagnosisKind.UNKNOWN
    claim: str = ""
    line: str = ""
    phase: str = ""
    spins: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress at the begin, middle and end of the window; ``total`` is 0 where it is not known."""

    source: str
    before: int
    middle: int
    after: int
    total: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """The ``seconds`` before the limit; ``cpu`` (cores, all processes) and output are of the second half."""

    seconds: float
    cpu: float
    output_bytes: int
    progress: tuple[Progress, ...] = ()


@dataclass(frozen=True, slots=True)
class Stall:
    """A finding of the rule ``stall`` in the run directory of a case; ``over`` if progress resumed."""

    verdict: str
    claim: str
    phase: str = ""
    line: str = ""
    refuted_if: str = ""
    path: str = ""
    over: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A file of evidence with its content, or evidence that is missing with the reason."""

    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything observed of one case.

    ``exit_code`` is negative where a signal ended it and None where its time was over; ``problem`` is why it
    did not start. ``arrived``: whether a variable of the plan reached the process that does the work.
    """

    seconds: float
    limit: float
    exit_code: int | None = None
    problem: str = ""
    success: bool | None = None
    window: Window | None = None
    processes: tuple[ProcessSample, ...] = ()
    stalls: tuple[Stall, ...] = ()
    error: str = ""
    error_line: str = ""
    tail: tuple[str, ...] = ()
    files: tuple[Note, ...] = ()
    missing: tuple[Note, ...] = ()
    ended_by: tuple[str, ...] = ()
    arrived: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """The file of one attempt; it counts for a case with the same digest."""

    digest: str
    observation: Observation
    format: int = FORMAT


@dataclass(frozen=True)
class Attempt:
    """One start of a case; ``root`` is the directory of the matrix."""

    root: Path
    path: Path

    @property
    def run(self) -> Path:
        """The run directory that a watched case writes."""
        return self.path / "run"

    @property
    def outputs(self) -> tuple[Path, Path]:
        """Standard output and standard error of the case."""
        return self.path / "stdout.txt", self.path / "stderr.txt"

    def relative(self, path: Path) -> str:
        """Return ``path`` relative to the directory of the matrix."""
        return path.relative_to(self.root).as_posix()

    def finish(self, case: Case, observation: Observation) -> None:
        """Store what was observed; from here on the case counts as done."""
        result = Result(case.digest, observation)
        write_whole(self.path / "result.json", TypeAdapter(Result).dump_json(result, indent=2))


@contextlib.contextmanager
def locked(root: Path, plan: Path) -> Iterator[None]:
    """Make the directory of a matrix and lock it; end what an interrupted matrix left running.

    Raises
    ------
    MatrixDirectoryError
        If the directory holds something else, or another matrix runs in it.
    """
    if (
        not (root / "plan.toml").is_file()
        and root.exists()
        and not (root.is_dir() and not any(root.iterdir()))
    ):
        raise MatrixDirectoryError(f"{root}: holds something that is no matrix; choose another --out")
    (root / "cases").mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(root / ".lock", timeout=0):
            write_whole(root / "plan.toml", plan.read_bytes())
            marks = set()
            for start in root.glob("cases/*/*/start.json"):
                if not (start.parent / "result.json").exists():
                    with contextlib.suppress(OSError, ValueError, KeyError):
                        marks.add(json.loads(start.read_bytes())["mark"])
            end_marked(marks)
            yield
    except filelock.Timeout:
        raise MatrixDirectoryError(
            f"{root}: another matrix is running in it; wait, or choose another --out"
        ) from None


def attempts(root: Path, name: str) -> list[Attempt]:
    """Return the attempts of a case, oldest first."""
    return [Attempt(root, path) for path in sorted((root / "cases" / name).glob("[0-9]*"))]


def stored(root: Path, case: Case) -> tuple[Attempt, Observation] | None:
    """Return the last attempt with a result of exactly this launch, None without one."""
    for attempt in reversed(attempts(root, case.name)):
        with contextlib.suppress(OSError, ValidationError):
            result = TypeAdapter(Result).validate_json((attempt.path / "result.json").read_bytes())
            if (result.format, result.digest) == (FORMAT, case.digest):
                return attempt, result.observation
    return None


def new_attempt(root: Path, case: Case) -> Attempt:
    """Make the directory of the next attempt of a case."""
    number = max((int(attempt.path.name) for attempt in attempts(root, case.name)), default=-1) + 1
    path = root / "cases" / case.name / f"{number:03d}"
    path.mkdir(parents=True)
    return Attempt(root, path)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; an OSError passes through."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
