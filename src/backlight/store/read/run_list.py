"""The runs of a directory, from little of each: the manifest, and the newest database of the first rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from backlight.records import Finding, RunStatus, Severity
from backlight.store.errors import RunFormatError
from backlight.store.format.manifest import AttemptEntry, Manifest, read_manifest
from backlight.store.format.names import (
    MANIFEST,
    attempt_folder,
    columns_folders,
    parse_database,
    unmerged,
    watchdog_files,
)
from backlight.store.format.schema import EVALUATED, WATCHDOG_RANK
from backlight.store.read.columnar import ColumnarDataset, ColumnarRank
from backlight.store.read.completeness import shortfall_of_first
from backlight.store.read.rank_file import RankFile, check_identity
from backlight.store.read.snapshot import Snapshot


class NoRunError(ValueError):
    """A directory that holds no run."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One directory of a list of runs.

    ``started`` and ``seconds`` are in seconds, since the epoch and over all attempts. ``loss`` is the last
    one that the first rank logged, None where none was, and ``loss_label`` what it is: ``loss``, ``sum of N
    losses``, or ``one of N losses`` where several networks have their own. ``findings`` are those stored
    while the run was watched, without hints; only with ``evaluated`` and without ``lacks``, what is missing
    of a recording to its end, does their absence mean that the rules found nothing. Of a directory that is no
    run, or a damaged one, all but ``path`` and ``problem`` is unknown.
    """

    path: Path
    state: RunStatus = RunStatus.UNKNOWN
    started: float | None = None
    seconds: float | None = None
    steps: int = 0
    loss: float | None = None
    loss_label: str = "loss"
    worst: Severity | None = None
    findings: int = 0
    evaluated: bool = False
    lacks: str = ""
    problem: str = ""


def list_runs(folder: Path) -> list[ListedRun]:
    """Return what is in each directory below ``folder``, the run started last first, others at the end.

    Raises
    ------
    NoRunError
        If ``folder`` does not exist, or cannot be read.
    """
    found = [_listed(path) for path in ([folder] if _is_run(folder) else _children(folder))]
    return sorted(found, key=lambda run: (run.started is None, -(run.started or 0.0), run.path.name))


def is_listed(file: PurePosixPath) -> bool:
    """Return whether a list of runs needs a file of one of them, given its path below the list or the run."""
    if file.suffix not in {".json", ".db", ".db-wal"} or file.name.startswith("."):
        return False
    span = parse_database(file.name.removesuffix("-wal"))
    return span is None or span[0] == 0


def latest_run(folder: Path) -> Path:
    """Return the run in ``folder`` that was started last.

    Raises
    ------
    NoRunError
        If it holds none.
    """
    started = []
    for path in _children(folder) if folder.is_dir() else []:
        try:
            attempts = read_manifest(path).attempts if _is_run(path) else []
        except RunFormatError:
            continue
        started += [(entry.started, path) for entry in attempts]
    if not started:
        what = "holds no run" if folder.is_dir() else "there is no such directory"
        raise NoRunError(f"{folder.absolute()}: {what}; name a RUN, or record one: backlight run train.py")
    return max(started)[1]


def _is_run(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _children(folder: Path) -> list[Path]:
    try:
        return [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except OSError as error:
        raise NoRunError(
            f"{folder.absolute()}: cannot be listed ({error.strerror}); expected a directory of runs, as "
            "backlight run train.py makes it"
        ) from None


def _listed(path: Path) -> ListedRun:
    try:
        if not _is_run(path):
            return ListedRun(path, problem=f"{path}: is not a run")
        manifest = read_manifest(path)
        if not manifest.attempts:
            return ListedRun(path, problem=f"{path}: no process has written to it")
        return _summary(path, manifest)
    except (RunFormatError, OSError) as error:
        return ListedRun(path, problem=_reason(path, error))


def _reason(path: Path, error: RunFormatError | OSError) -> str:
    return f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)


def _summary(path: Path, manifest: Manifest) -> ListedRun:
    newest = max(manifest.attempts, key=lambda entry: entry.index)
    state = newest.progress.status_now()
    steps, loss, label, problem = newest.step_offset + newest.progress.step, None, "loss", ""
    findings: list[Finding] = []
    evaluated: dict[str, Any] | None = None
    try:
        files = _newest_files(path, newest, manifest.run_id, live=state is RunStatus.RUNNING)
    except (RunFormatError, OSError) as error:
        files, problem = [], _reason(path, error)
    for file in files:
        findings += file.findings()
        if file.rank != WATCHDOG_RANK:
            evaluated = evaluated or file.last_event(EVALUATED)
            last = file.last_scalar("backlight", "loss")
            if state not in {RunStatus.FINISHED, RunStatus.FAILED}:  # these have stored their last step
                steps = max(steps, file.last_step)
            if last is not None:
                loss, label = last, _loss_label(file)
    subjects = {
        (f.rule, f.subject.parameter, f.subject.module): f.severity for f in findings if not f.is_hint
    }
    return ListedRun(
        path, state, manifest.attempts[0].started, sum(map(_seconds, manifest.attempts)), steps + 1,
        loss, label, max(subjects.values(), key=lambda severity: severity.rank, default=None), len(subjects),
        evaluated is not None and steps >= 0,  # without a step, nothing was there to evaluate
        shortfall_of_first(newest, steps, evaluated), problem,
    )  # fmt: skip


def _loss_label(file: RankFile) -> str:
    own = sum(of == "backlight" and name.startswith("loss/") for _, of, name in file.scalar_names)
    sums = file.last_scalar("backlight", "losses")
    if own > 1:
        return f"one of {own} losses"
    return f"sum of {int(sums)} losses" if sums else "loss"


def _newest_files(path: Path, entry: AttemptEntry, run_id: str, *, live: bool) -> Sequence[RankFile]:
    """Return the newest database of the first rank of an attempt, and those of its watchdogs."""
    folder = path / attempt_folder(entry.index)
    files: list[RankFile] = []
    if columnar := columns_folders(folder):
        dataset = ColumnarDataset(columnar[-1])
        ranks = sorted(dataset.index.ranks, key=lambda index: index.rank)[:1]
        files += [
            ColumnarRank(dataset, rank, attempt=entry.index, step_offset=entry.step_offset) for rank in ranks
        ]
    spans = {p.name: span for p in folder.iterdir() if (span := parse_database(p.name)) is not None}
    first = min((rank for rank, _, _ in spans.values()), default=0)
    names = unmerged((name, span) for name, span in spans.items() if span[0] == first and not files)
    wanted = [(folder / name, first) for name in names[-1:]]
    wanted += [(file, WATCHDOG_RANK) for file in watchdog_files(folder)]
    for file, rank in wanted:
        snapshot = Snapshot(file, live=live and rank == first, hold=True)
        check_identity(file, snapshot.meta, rank, run_id, entry.launch)
        files.append(RankFile(file, snapshot, attempt=entry.index, rank=rank, step_offset=entry.step_offset))
    return files


def _seconds(entry: AttemptEntry) -> float:
    running = entry.progress.status_now() is RunStatus.RUNNING
    end = entry.progress.ended or (time.time() if running else entry.progress.updated)
    return max(0.0, end - entry.started)
