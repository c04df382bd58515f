"""The runs of a directory, from little of each: the manifest, and the newest database of the first rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from backlight.records import RunStatus, Severity
from backlight.store.errors import RunFormatError
from backlight.store.format.manifest import AttemptEntry, ListedSummary, Manifest, read_manifest
from backlight.store.format.names import (
    MANIFEST,
    WATCHDOG_DATABASE,
    attempt_folder,
    columns_folders,
    parse_columns,
    parse_database,
    unmerged,
)
from backlight.store.format.schema import EVALUATED, WATCHDOG_RANK, is_loss
from backlight.store.read.attempt_files import shortfall_of_first
from backlight.store.read.columnar import ColumnarDataset, ColumnarRank
from backlight.store.read.rank_file import RankFile, open_rank_file
from backlight.text import visible

_ENDED = {RunStatus.FINISHED, RunStatus.FAILED}
"""Statuses of attempts whose writer has closed its files."""


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
    """Return what is in each directory below ``folder``, the newest run first; NoRunError for no folder."""
    runs = [_listed(path) for path in ([folder] if _is_run(folder) else _children(folder))]
    return sorted(runs, key=lambda run: (run.started is None, -(run.started or 0.0), run.path.name))


def is_listed(file: PurePosixPath) -> bool:
    """Return whether a list of runs needs a file of one of them, given its path below the list or the run."""
    if file.suffix not in {".json", ".db", ".db-wal"} or file.name.startswith("."):
        return False
    span = parse_database(file.name.removesuffix("-wal"))
    return span is None or span[0] == 0


def latest_run(folder: Path) -> Path:
    """Return the run in ``folder`` that was started last; NoRunError where it holds none."""
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
        return _summary(path, read_manifest(path))
    except (RunFormatError, OSError) as error:
        return ListedRun(path, problem=_reason(path, error))


def _reason(path: Path, error: RunFormatError | OSError) -> str:
    return f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)


def _summary(path: Path, manifest: Manifest) -> ListedRun:
    newest = max(manifest.attempts, key=lambda entry: entry.index)
    state = newest.progress.status_now()
    steps, problem = newest.step_offset + newest.progress.step, ""
    summary = newest.summary if state in _ENDED and _is_unchanged(path, newest) else None
    if summary is None:
        try:
            files = _newest_files(path, newest, manifest.run_id, live=state is RunStatus.RUNNING)
        except (RunFormatError, OSError) as error:
            files, problem = [], _reason(path, error)
        summary = _summary_of(files)
        if state not in _ENDED:  # these have stored their last step
            steps = max(steps, *(file.last_step for file in files if file.rank != WATCHDOG_RANK), -1)
    return ListedRun(
        path, state, manifest.attempts[0].started, sum(map(_seconds, manifest.attempts)), steps + 1,
        summary.loss, visible(summary.loss_label), summary.worst, summary.findings,
        summary.evaluated and steps >= 0,  # without a step, nothing was there to evaluate
        shortfall_of_first(newest, steps) or visible(summary.lacks), problem,
    )  # fmt: skip


def _is_unchanged(path: Path, entry: AttemptEntry) -> bool:
    """Return whether the database is the only one of its attempt, and as it was when it was summarised."""
    if entry.summary is None:
        return False
    with contextlib.suppress(OSError):
        return entry.database_state(path) == (entry.summary.size, entry.summary.changed)
    return False


def _summary_of(files: Sequence[RankFile]) -> ListedSummary:
    evaluated: dict[str, Any] | None = None
    losses: dict[str, float] = {}
    for file in files:
        if file.rank != WATCHDOG_RANK:
            evaluated = evaluated or file.last_event(EVALUATED)
            names = [name for _, of, name in file.scalar_names if is_loss(name, of)]
            last = {name: file.last_scalar("backlight", name) for name in names}
            losses |= {name: value for name, value in last.items() if value is not None}
    return ListedSummary.of([finding for file in files for finding in file.findings()], evaluated, losses)


def _newest_files(path: Path, entry: AttemptEntry, run_id: str, *, live: bool) -> Sequence[RankFile]:
    """Return the newest database of the first rank of an attempt, and those of its watchdogs."""
    folder = path / attempt_folder(entry.index)
    children = sorted(os.listdir(folder))  # noqa: PTH208 - names alone, for thousands of runs
    files: list[RankFile] = []
    if any(parse_columns(name) is not None for name in children) and (columnar := columns_folders(folder)):
        dataset = ColumnarDataset(columnar[-1])
        ranks = sorted(dataset.index.ranks, key=lambda index: index.rank)[:1]
        files += [
            ColumnarRank(dataset, rank, attempt=entry.index, step_offset=entry.step_offset) for rank in ranks
        ]
    spans = {name: span for name in children if (span := parse_database(name)) is not None}
    first = min((rank for rank, _, _ in spans.values()), default=0)
    names = unmerged((name, span) for name, span in spans.items() if span[0] == first and not files)
    wanted = [(folder / name, first) for name in names[-1:]]
    wanted += [(folder / name, WATCHDOG_RANK) for name in children if WATCHDOG_DATABASE.fullmatch(name)]
    return files + [
        open_rank_file(file, rank, entry, run_id, live=live and rank == first, hold=True)
        for file, rank in wanted
    ]


def _seconds(entry: AttemptEntry) -> float:
    running = entry.progress.status_now() is RunStatus.RUNNING
    end = entry.progress.ended or (time.time() if running else entry.progress.updated)
    return max(0.0, end - entry.started)
