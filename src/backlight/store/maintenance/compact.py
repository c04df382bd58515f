"""Compaction of a run that no process writes any more: fewer, closed files, and a manifest with its end.

Each step leaves a run that opens: SQLite itself moves a log into its file, a new file is complete before it
is renamed, the name of a merged file says which ones it replaces, and those are removed last. After an
interruption at any point, compaction can be run again.
"""

from __future__ import annotations

import contextlib
import socket
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from backlight.records import RunStatus
from backlight.store.errors import RunExistsError, RunFormatError, RunWriteError
from backlight.store.format.hdf5_pieces import Filters, merged, read_piece, write_piece
from backlight.store.format.manifest import Manifest, Progress, read_manifest
from backlight.store.format.names import (
    ARRAYS,
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
from backlight.store.format.schema import COUNTED, SERIES
from backlight.store.platform import atomic_json
from backlight.store.platform.filesystem import folder_size, locked
from backlight.store.read.attempt_files import AttemptFiles, open_attempt
from backlight.store.read.snapshot import Snapshot, sibling, size_of
from backlight.store.write.arrays import MAX_MERGED_BYTES
from backlight.store.write.database import PAGE_BYTES, connect, create_tables

__all__ = ["Compaction", "compact"]

_SHARED = ("parameter_table", "scalar_name")


@dataclass(slots=True)
class Compaction:
    """Result of a compaction: bytes before and after, and notes for the user."""

    before: int = 0
    after: int = 0
    notes: list[str] = field(default_factory=list)


def compact(path: str | Path, *, every: int | None = None, force: bool = False) -> Compaction:
    """Compact a run; keep every Nth step of its series; with ``force`` also where a writer may still live."""
    path = Path(path)
    if every is not None and every < 1:
        raise ValueError(f"every is {every}, expected at least 1")
    result = Compaction()
    read_manifest(path)
    try:
        with locked(path):
            manifest = read_manifest(path)
            opened = [open_attempt(path, entry, manifest.run_id) for entry in manifest.attempts]
            for attempt in opened:
                _refuse_running(path, attempt, force=force)
            result.before = folder_size(path)
            for attempt in opened:
                _compact_attempt(path, attempt, manifest, every, result)
            _sweep(path)
            manifest.write(path)
            result.after = folder_size(path)
    except (OSError, sqlite3.Error) as error:
        raise RunWriteError(f"{path}: cannot be compacted: {error}; what was recorded still opens") from error
    return result


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
    path: Path, attempt: AttemptFiles, manifest: Manifest, every: int | None, result: Compaction
) -> None:
    folder = attempt.folder
    if not folder.is_dir():
        return
    _sweep(folder)
    for watchdog in watchdog_files(folder):
        try:
            if sibling(watchdog, "-wal").exists():
                Snapshot(watchdog)
                _fold_log(watchdog)
        except (RunFormatError, RunWriteError) as error:
            # A watchdog may outlive the process that it watched, and its file is independent of the others.
            result.notes.append(str(error))
    for rank, progress in attempt.progress.items():
        _recover_local(folder, rank, progress, manifest.run_id, result)
        _databases(folder, rank, every, result)
        _pieces(folder, rank, result)
        _finish(path, folder, rank, progress)
        if rank != attempt.entry.first:
            document = atomic_json.read_document(folder / document_name(rank))
            document["progress"] = progress
            atomic_json.write_document(folder / document_name(rank), document)


def _recover_local(folder: Path, rank: int, progress: Progress, run_id: str, result: Compaction) -> None:
    """Publish the rows that a killed writer on network storage had only on its local disk."""
    if not progress.local:
        return
    local = Path(progress.local)
    source = local / database_name(rank)
    if progress.process.host != socket.gethostname() or not source.is_file():
        result.notes.append(
            f"{source} on {progress.process.host} does not exist here; its rows are not recovered"
        )
        return
    try:
        meta: dict[str, str] = dict(Snapshot(source).rows("SELECT key, value FROM meta"))
    except RunFormatError as error:
        result.notes.append(str(error))
        return
    if (meta.get("run_id"), meta.get("rank")) != (run_id, str(rank)):
        result.notes.append(f"{source} belongs to another run and is left alone")
        return
    _fold_log(source)
    taken = [
        span for p in folder.iterdir() if (span := parse_database(p.name)) is not None and span[0] == rank
    ]
    atomic_json.copy_atomically(
        source, folder / segment_name(rank, max((last for _, _, last in taken), default=-1) + 1)
    )
    progress.local = ""
    # The manifest is untrusted: nothing but this file and an empty folder is removed.
    source.unlink()
    with contextlib.suppress(OSError):
        local.rmdir()
    result.notes.append(f"recovered {source}")


def _databases(folder: Path, rank: int, every: int | None, result: Compaction) -> None:
    """Merge the databases of a rank into one closed file."""
    found = {
        p.name: s for p in folder.iterdir() if (s := parse_database(p.name)) is not None and s[0] == rank
    }
    names = unmerged(found.items())
    for name in set(found) - set(names):
        (folder / name).unlink()
    for group in ([n for n in names if found[n][1] < 0], [n for n in names if found[n][1] >= 0]):
        logs = [name for name in group if sibling(folder / name, "-wal").exists()]
        if not group or (len(group) == 1 and not logs and every is None):
            continue
        spans = [found[name] for name in group]
        whole = group[0] if spans[0][1] < 0 else segment_name(rank, spans[0][1], spans[-1][2])
        try:
            for name in group:
                Snapshot(folder / name)
                _fold_log(folder / name)
            _merge(folder, group, whole, every)
        except (RunFormatError, sqlite3.DatabaseError) as error:
            result.notes.append(f"{folder.name}: {', '.join(group)} stay as they are: {error}")
            continue
        for name in group:
            if name != whole:
                (folder / name).unlink()


def _fold_log(path: Path) -> None:
    """Checkpoint a log into its database file; only then may the file be replaced by another one."""
    try:
        with contextlib.closing(connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            mode = connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    except sqlite3.OperationalError as error:
        raise RunWriteError(f"{path}: is in use: {error}; close its readers and try again") from error
    if mode != "delete" or size_of(sibling(path, "-wal")):
        raise RunWriteError(f"{path}: is in use by another program; close it and try again")


def _merge(folder: Path, names: list[str], whole: str, every: int | None) -> None:
    """Copy the rows of closed databases into a new one; a source that lacks rows is refused."""
    temporary = atomic_json.temporary_name(folder / whole)
    temporary.unlink(missing_ok=True)
    connection = connect(temporary)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        sources = [f"{(folder / name).absolute().as_uri()}?mode=ro" for name in names]
        kept: dict[str, set[int]] = {f"series_{series}": set() for series in SERIES}
        for i, source in enumerate(sources):
            connection.execute("ATTACH ? AS source", (source,))
            if i == 0:
                create_tables(connection, dict(connection.execute("SELECT key, value FROM source.meta")))
            for table in COUNTED:
                count, last = connection.execute(f"SELECT count(*), max(id) FROM source.{table}").fetchone()
                if count != (last or 0):  # copying the others would hide the loss
                    raise sqlite3.DatabaseError(f"{names[i]} lacks rows of table {table}")
            for table, steps in kept.items() if every is not None else ():
                steps.update(row[0] for row in connection.execute(f"SELECT step FROM source.{table}"))
            connection.execute("DETACH source")
        connection.execute("CREATE TEMP TABLE kept (series TEXT, step INTEGER, PRIMARY KEY (series, step))")
        for table, steps in kept.items():
            rows = [(table, step) for step in sorted(steps)[:: every or 1]]
            connection.executemany("INSERT INTO kept VALUES (?, ?)", rows)
        for source in sources:
            connection.execute("ATTACH ? AS source", (source,))
            connection.execute("BEGIN")
            for table in COUNTED:
                _copy_rows(connection, table, thin=every is not None and table in kept)
            connection.execute("COMMIT")
            connection.execute("DETACH source")
        check = connection.execute("PRAGMA integrity_check").fetchone()[0]
        if check != "ok":
            raise sqlite3.DatabaseError(f"the merged file fails its check: {check}")
        connection.close()
        atomic_json.sync_file(temporary)
        atomic_json.publish(temporary, folder / whole)
    finally:
        connection.close()
        temporary.unlink(missing_ok=True)


def _copy_rows(connection: sqlite3.Connection, table: str, *, thin: bool) -> None:
    """Append the rows of ``source.table`` under new ids without gaps; shared tables keep theirs."""
    columns = [row[1] for row in connection.execute(f"PRAGMA source.table_info({table})")]
    # Segments repeat the tables that their rows refer to, with the same ids.
    named = ", ".join(column for column in columns if table in _SHARED or column != "id")
    verb = "INSERT OR IGNORE" if table in _SHARED else "INSERT"
    where = f" WHERE step IN (SELECT step FROM kept WHERE series = '{table}')" if thin else ""
    connection.execute(
        f"{verb} INTO main.{table} ({named}) SELECT {named} FROM source.{table}{where} ORDER BY id"
    )


def _pieces(folder: Path, rank: int, result: Compaction) -> None:
    """Merge neighbouring pieces of arrays up to the largest size."""
    arrays = folder / ARRAYS
    if not arrays.is_dir():
        return
    _sweep(arrays)
    mine = [path for owner, path in pieces(folder) if owner == rank]
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
                result.notes.append(f"{arrays.name} of {folder.name} stay as they are: {error}")
            else:
                for old in group:
                    old.unlink()
        group = [] if piece is None else [piece]


def _finish(path: Path, folder: Path, rank: int, progress: Progress) -> None:
    """Set how the attempt ended, and the last rows of the files as they are now."""
    if progress.status is RunStatus.RUNNING:
        progress.status = RunStatus.KILLED
        progress.ended = progress.updated
    files: dict[str, dict[str, int]] = {}
    for child in sorted(folder.iterdir()):
        span = parse_database(child.name)
        if span is not None and span[0] == rank:
            try:
                snapshot = Snapshot(child)
                rows = {t: snapshot.rows(f"SELECT max(id) FROM {t}")[0][0] for t in COUNTED}
            except RunFormatError:
                # The stated rows of a damaged file stay: they are the measure of the loss.
                key = child.relative_to(path).as_posix()
                rows = dict(progress.files.get(key, {}))
            files[child.relative_to(path).as_posix()] = {t: int(n) for t, n in rows.items() if n}
    for owner, piece in pieces(folder):
        if owner == rank:
            files[piece.relative_to(path).as_posix()] = {"bytes": piece.stat().st_size}
    progress.files = files


def _sweep(folder: Path) -> None:
    """Remove temporary files of killed processes."""
    for child in folder.iterdir():
        if atomic_json.is_temporary(child.name) and child.is_file():
            child.unlink()
