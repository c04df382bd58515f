"""Maintenance of runs that no process writes any more: compaction, and joining of what hosts wrote apart.

Compaction puts columns in the place of databases and states how the run ended. Each step leaves a run that
opens: SQLite itself moves a log into its file, a new file or dataset is verified and complete before it is
renamed, and what it replaces is removed last. After an interruption at any point, it can be run again.

Every rank has files of its own, so joining is copying: an existing file with the same content is skipped, so
that it can be repeated.

Who may write to a run can replace its folders by links at any moment. Each is held open while it is changed,
and its files are created, renamed and removed below what is open.
"""

from __future__ import annotations

import contextlib
import filecmp
import importlib.util
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from backlight import atomic_files, codec, untrusted_files
from backlight.records import RunStatus
from backlight.store.errors import RunExistsError, RunFormatError, RunWriteError, StoreError
from backlight.store.filesystem import folder_size, is_locked, locked, pinned, refuse_links
from backlight.store.format.arrays import MAX_MERGED_BYTES, Filters, merged, read_piece, write_piece
from backlight.store.format.manifest import (
    AttemptEntry,
    Manifest,
    Progress,
    read_document,
    read_manifest,
    write_document,
)
from backlight.store.format.names import (
    ARRAYS,
    EVIDENCE,
    RANK_DOCUMENT,
    WATCHDOG_DATABASE,
    attempt_folder,
    columns_folders,
    database_name,
    document_name,
    parse_database,
    parse_piece,
    piece_name,
    pieces,
    segment_name,
    unmerged,
    watchdog_files,
)
from backlight.store.format.schema import ROWS
from backlight.store.read.attempt_files import AttemptFiles, open_attempt
from backlight.store.read.columnar import ColumnarRank
from backlight.store.read.rank_file import check_identity
from backlight.store.read.snapshot import SIDE_FILES, Snapshot, sibling, size_of
from backlight.store.write.database import is_scratch

Advance = Callable[[int, int], object]
"""Called with how many of how many files were read."""


@dataclass(slots=True)
class Compaction:
    """Result of a compaction: bytes before and after, and notes for the user."""

    before: int = 0
    after: int = 0
    notes: list[str] = field(default_factory=list)


def compact(
    path: str | Path, *, every: int | None = None, force: bool = False, advance: Advance = lambda *_: None
) -> Compaction:
    """Compact a run; ``advance`` is called with how many of how many ranks of a series were read.

    Parameters
    ----------
    every:
        Recorded steps of which one is kept; None for all.
    force:
        Whether to compact where a writer on another machine may still live.

    Raises
    ------
    ValueError
        If ``every`` is below 1.
    RunWriteError
        If the file system refuses.
    """
    if every is not None and every < 1:
        raise ValueError(f"every is {every}, expected at least 1")
    result = Compaction()
    read_manifest(Path(path))
    try:
        with _pinned_folder(Path(path), result, links=True) as run:
            refuse_links(run)
            with locked(run):
                _compact(run, result, every, force, advance)
    except (OSError, sqlite3.Error) as error:
        raise RunWriteError(f"{path}: cannot be compacted: {error}; what was recorded still opens") from error
    return result


@contextlib.contextmanager
def _pinned_folder(folder: Path, result: Compaction, *, links: bool = False) -> Iterator[Path]:
    """Hold a folder open, and yield a path below which its files are; notes and errors have its name."""
    with pinned(folder, links=links) as path:
        try:
            yield path
        except (StoreError, OSError, sqlite3.Error) as error:
            kind = OSError if isinstance(error, OSError) else type(error)
            raise kind(str(error).replace(f"{path}", f"{folder}")) from error
        finally:
            result.notes = [note.replace(f"{path}", f"{folder}") for note in result.notes]


def _compact(path: Path, result: Compaction, every: int | None, force: bool, advance: Advance) -> None:
    manifest = read_manifest(path)
    opened = [open_attempt(path, entry, manifest.run_id) for entry in manifest.attempts]
    for attempt in opened:
        _refuse_running(path, attempt, force=force)
    result.before = folder_size(path)
    for attempt in opened:
        if attempt.folder.is_dir():
            with _pinned_folder(attempt.folder, result) as folder:
                _compact_attempt(folder, attempt, every, advance, result)
    _sweep(path)
    manifest.write(path)
    result.after = folder_size(path)


def _refuse_running(path: Path, attempt: AttemptFiles, *, force: bool) -> None:
    for rank, progress in attempt.progress.items():
        status = progress.status_now()
        who = f"rank {rank} of attempt {attempt.entry.index} (process {progress.process.pid}"
        who = f"{who} on {progress.process.host})"
        if status is RunStatus.RUNNING:
            raise RunExistsError(f"{path}: {who} is still writing; compact the run when it has ended")
        if status is RunStatus.UNKNOWN and progress.status is RunStatus.RUNNING and not force:
            msg = f"{path}: whether {who} still writes is not observable from here"
            raise RunExistsError(f"{msg}; compact the run there, or force it")


def _compact_attempt(
    folder: Path, attempt: AttemptFiles, every: int | None, advance: Advance, result: Compaction
) -> None:
    name = attempt.folder.name
    attempt.folder = folder
    _sweep(folder)
    for watchdog in watchdog_files(folder):
        try:
            _merge_log(watchdog)
        except (RunFormatError, RunWriteError) as error:
            # A watchdog may outlive the process that it watched, and its file is independent of the others.
            result.notes.append(str(error))
    for rank, progress in attempt.progress.items():
        _recover_local(folder, rank, progress, attempt.run_id, attempt.entry.launch, result)
        try:
            _merge_logs(folder, rank)
        except (RunFormatError, sqlite3.DatabaseError) as error:
            result.notes.append(str(error))
        if (folder / ARRAYS).is_dir():
            with _pinned_folder(folder / ARRAYS, result) as arrays:
                _pieces(arrays, rank, result)
    _to_columns(attempt, every, advance, result)
    for rank, progress in attempt.progress.items():
        _finish(folder, name, rank, progress)
        if rank != attempt.entry.first:
            document = read_document(folder / document_name(rank))
            document["progress"] = progress
            write_document(folder / document_name(rank), document)


def _recover_local(
    folder: Path, rank: int, progress: Progress, run_id: str, launch: str, result: Compaction
) -> None:
    """Publish the rows that a killed writer on network storage had only on its local disk.

    They are copied, and only from where a writer of this user keeps them: any run may name any folder.
    """
    if not progress.local:
        return
    source = Path(progress.local) / database_name(rank)
    if progress.process.host != socket.gethostname() or not source.is_file():
        result.notes.append(
            f"{source} on {progress.process.host} does not exist here; its rows are not recovered"
        )
        return
    if not is_scratch(source.parent):
        result.notes.append(f"{source}: is not where this user's runs keep their rows; it is left alone")
        return
    taken = [
        span for p in folder.iterdir() if (span := parse_database(p.name)) is not None and span[0] == rank
    ]
    segment = segment_name(rank, max((last for _, _, last in taken), default=-1) + 1)
    try:
        snapshot = Snapshot(source)
        check_identity(source, snapshot.meta, rank, run_id, launch)
        atomic_files.copy(snapshot.merged(), folder / segment)
    except RunFormatError as error:
        result.notes.append(str(error))
        return
    progress.local = ""
    result.notes.append(f"recovered {source}, which is needed no longer")


def _merge_logs(folder: Path, rank: int) -> None:
    """Move the logs of the databases of a rank into them, and remove databases that wider ones replace."""
    spans = {
        p.name: s for p in folder.iterdir() if (s := parse_database(p.name)) is not None and s[0] == rank
    }
    names = unmerged(spans.items())
    for name in set(spans) - set(names):
        (folder / name).unlink()
        _remove_side_files(folder / name)
    for name in names:
        _merge_log(folder / name)


def _to_columns(attempt: AttemptFiles, every: int | None, advance: Advance, result: Compaction) -> None:
    """Replace the databases of an attempt, or its dataset where steps are thinned, by a columnar dataset."""
    folder = attempt.folder
    opened = open_attempt(folder.parent, attempt.entry, attempt.run_id, folder=folder)
    away = [rank for rank, progress in attempt.progress.items() if progress.local]
    is_done = every is None and all(isinstance(file, ColumnarRank) for file in opened.files)
    if is_done or not opened.files:
        _remove_replaced(folder, opened)
        return
    reason = ""
    if importlib.util.find_spec("pyarrow") is None:
        reason = "pyarrow is not installed: pip install 'backlight[parquet]'"
    elif opened.entry.first:
        reason = "it is a part of a run; add it to the run of rank 0 with `backlight join`, and compact that"
    elif away:
        reason = f"rows of rank {away[0]} are still on its machine; compact the run there, too"
    elif opened.unreadable:
        reason = opened.losses[0]
    else:
        from backlight.store.write.columnar import write_dataset  # noqa: PLC0415 - it needs pyarrow

        try:
            write_dataset(opened, every, advance)
        except RunFormatError as error:
            reason = str(error)
    if reason:
        name = attempt_folder(attempt.entry.index)
        result.notes.append(f"{name}: its files stay as they are: {reason}")
        return
    opened = open_attempt(folder.parent, attempt.entry, attempt.run_id, folder=folder)
    _remove_replaced(folder, opened)


def _remove_replaced(folder: Path, opened: AttemptFiles) -> None:
    """Remove what the newest dataset holds: older datasets, and the databases of its ranks."""
    replaced_ranks = {file.rank for file in opened.files if isinstance(file, ColumnarRank)}
    for child in sorted(folder.iterdir()):
        span = parse_database(child.name)
        if span is not None and span[0] in replaced_ranks:
            child.unlink()
            _remove_side_files(child)
    for older in columns_folders(folder)[:-1] if replaced_ranks else []:
        shutil.rmtree(older)


def _merge_log(path: Path) -> None:
    """Replace a database by a copy that holds the rows of its log, and remove what lay next to it."""
    if not any(os.path.lexists(sibling(path, suffix)) for suffix in SIDE_FILES):
        return
    if is_locked(path):
        raise RunWriteError(f"{path}: is in use by another program; close it and try again")
    snapshot = Snapshot(path)
    if size_of(sibling(path, "-wal")):
        atomic_files.copy(snapshot.merged(), path)
    _remove_side_files(path)


def _remove_side_files(path: Path) -> None:
    for suffix in SIDE_FILES:
        sibling(path, suffix).unlink(missing_ok=True)


def _pieces(arrays: Path, rank: int, result: Compaction) -> None:
    """Merge neighbouring pieces of arrays up to the largest size."""
    _sweep(arrays)
    mine = [path for owner, path in pieces(arrays) if owner == rank]
    for path in arrays.iterdir():
        span = parse_piece(path.name)
        if span is not None and span[0] == rank and path not in mine:
            path.unlink()
    group: list[Path] = []
    for piece in [*mine, None]:
        if piece is not None and sum(p.stat().st_size for p in [*group, piece]) <= MAX_MERGED_BYTES:
            group.append(piece)
            continue
        if len(group) > 1:
            spans = [parse_piece(p.name) or (rank, 0, 0) for p in group]
            whole = arrays / piece_name(rank, spans[0][1], spans[-1][2])
            try:
                write_piece(whole, merged([stack for p in group for stack in read_piece(p)]), Filters())
            except RunFormatError as error:
                result.notes.append(f"{arrays}: its files stay as they are: {error}")
            else:
                for old in group:
                    old.unlink()
        group = [] if piece is None else [piece]


def _finish(folder: Path, name: str, rank: int, progress: Progress) -> None:
    """Set how the attempt ended, and the last rows of the files as they are now; ``name`` is the folder's."""
    if progress.status is RunStatus.RUNNING:
        progress.status = RunStatus.KILLED
        progress.ended = progress.updated
    files: dict[str, dict[str, int]] = {}
    for child in sorted(folder.iterdir()):
        span = parse_database(child.name)
        if span is not None and span[0] == rank:
            key = f"{name}/{child.name}"
            try:
                snapshot = Snapshot(child)
                rows = {t: snapshot.rows(f"SELECT max(id) FROM {t}")[0][0] for t in ROWS}
            except RunFormatError:
                # The stated rows of a damaged file stay: they are the measure of the loss.
                rows = dict(progress.files.get(key, {}))
            files[key] = {t: int(n) for t, n in rows.items() if n}
    for owner, piece in pieces(folder / ARRAYS):
        if owner == rank:
            files[f"{name}/{ARRAYS}/{piece.name}"] = {"bytes": piece.stat().st_size}
    progress.files = files


def _sweep(folder: Path) -> None:
    """Remove temporary files and datasets of killed processes."""
    for child in folder.iterdir():
        if atomic_files.is_temporary(child.name) and child.is_file():
            child.unlink()
        elif atomic_files.is_temporary(child.name) and not child.is_symlink():
            shutil.rmtree(child)


@dataclass(slots=True)
class Merge:
    """Result of a merge: ``ranks`` by attempt of the run, and the number of files."""

    ranks: dict[int, list[int]] = field(default_factory=dict)
    files: int = 0


def merge_hosts(run: str | Path, parts: Sequence[Path]) -> Merge:
    """Copy the files of other hosts from ``parts`` into ``run``; the parts stay as they are."""
    run = Path(run)
    out = Merge()
    try:
        refuse_links(run)
        with locked(run):
            manifest = read_manifest(run)
            for entry in manifest.attempts:
                for progress in open_attempt(run, entry, manifest.run_id).progress.values():
                    _refuse_living(run, progress)
            for part in parts:
                plan = _plan(run, manifest, Path(part))
                for source, target in plan.files:
                    target.parent.mkdir(exist_ok=True)
                    atomic_files.copy(source, target)
                for target, document in plan.documents.items():
                    write_document(target, document)
                out.files += len(plan.files) + len(plan.documents)
                for attempt, ranks in plan.ranks.items():
                    out.ranks.setdefault(attempt, []).extend(ranks)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunWriteError(f"{run}: cannot be joined: {reason}; the run still opens") from error
    return out


@dataclass(slots=True)
class _Plan:
    files: list[tuple[Path, Path]] = field(default_factory=list)
    documents: dict[Path, dict[str, Any]] = field(default_factory=dict)
    ranks: dict[int, list[int]] = field(default_factory=dict)


def _plan(run: Path, manifest: Manifest, part: Path) -> _Plan:
    """Return what is to be copied from one part; all refusals happen here, before any copy."""
    other = read_manifest(part)
    refuse_links(part)
    if part.resolve() == run.resolve():
        raise RunExistsError(f"{part}: is the run itself; give the folders that other hosts wrote")
    launches = {entry.launch: entry for entry in manifest.attempts}
    out = _Plan()
    for entry in other.attempts:
        _refuse_living(part, entry.progress)
        existing = launches.get(entry.launch)
        if existing is None:
            raise RunExistsError(
                f"{part}: attempt {entry.index} belongs to launch {entry.launch!r}, of which {run} has no "
                f"attempt (it has {', '.join(map(repr, launches)) or 'none'}); join it to the run of its "
                "rank 0"
            )
        opened = open_attempt(part, entry, other.run_id)
        for progress in opened.progress.values():
            _refuse_living(part, progress)
        _plan_attempt(run, existing, opened, out)
    return out


def _plan_attempt(run: Path, existing_attempt: AttemptEntry, opened: AttemptFiles, out: _Plan) -> None:
    target = run / attempt_folder(existing_attempt.index)
    if not opened.folder.is_dir():
        return
    if columns_folders(opened.folder):
        raise RunExistsError(f"{opened.folder}: was compacted; join the parts first, then compact the run")
    for source in sorted(p for p in opened.folder.rglob("*") if not p.is_dir()):
        below = source.relative_to(opened.folder)
        if not _is_store_file(below):
            continue
        _refuse_foreign(source)
        if RANK_DOCUMENT.fullmatch(below.name) and len(below.parts) == 1:
            rank = int(below.stem.removeprefix("rank-"))
            document = _document(source, opened, rank, target.name)
            existing = target / document_name(rank)
            if existing.exists():
                if read_document(existing) != codec.plain(document):
                    raise _conflict(existing, source)
                continue
            out.documents[existing] = document
            out.ranks.setdefault(existing_attempt.index, []).append(rank)
        elif (target / below).exists():
            if not filecmp.cmp(source, target / below, shallow=False):
                raise _conflict(target / below, source)
        else:
            out.files.append((source, target / below))


def _is_store_file(below: Path) -> bool:
    if len(below.parts) == 1:
        name = below.name.removesuffix("-wal")
        return bool(
            parse_database(name) or WATCHDOG_DATABASE.fullmatch(name) or RANK_DOCUMENT.fullmatch(name)
        )
    folder, name = below.parts[0], below.name
    is_named = parse_piece(name) is not None if folder == ARRAYS else not name.startswith(".")
    return len(below.parts) == 2 and folder in {ARRAYS, EVIDENCE} and is_named


def _refuse_foreign(source: Path) -> None:
    """Refuse a file that may be one from outside of the part, which the run would then publish."""
    try:
        owners = untrusted_files.owners_beside(source)
        untrusted_files.check(source, atomic_files.MAX_COPIED_BYTES, owners=owners)
    except OSError as error:
        raise RunFormatError(f"{source}: {error.strerror}; nothing was copied from there") from error


def _document(source: Path, opened: AttemptFiles, rank: int, folder: str) -> dict[str, Any]:
    """Return the document of a rank for the run: with its progress, files by their new paths."""
    document = read_document(source)
    progress = opened.progress.get(rank)
    if progress is None:
        raise RunFormatError(f"{source}: holds no progress of its rank; it is damaged")
    stated: dict[str, Any] = codec.plain(progress)
    stated["files"] = {
        str(PurePosixPath(folder, *PurePosixPath(name).parts[1:])): last
        for name, last in stated["files"].items()
    }
    return document | {"progress": stated}


def _refuse_living(path: Path, progress: Progress) -> None:
    if progress.status_now() is RunStatus.RUNNING:
        who = f"process {progress.process.pid} on {progress.process.host}"
        raise RunExistsError(f"{path}: is still being written by {who}; join it when that has ended")


def _conflict(existing: Path, source: Path) -> RunExistsError:
    return RunExistsError(
        f"{existing}: exists with another content than {source}; nothing was copied from there"
    )
