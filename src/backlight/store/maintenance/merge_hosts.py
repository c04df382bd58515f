"""Merging of the parts of a run that hosts without a shared folder wrote separately.

Every rank has files of its own, so merging is copying: an existing file with the same content is skipped, so
that the merge can be repeated.
"""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from backlight import atomic_files, codec, untrusted_files
from backlight.records import RunStatus
from backlight.store.errors import RunExistsError, RunFormatError, RunWriteError
from backlight.store.format.manifest import AttemptEntry, Manifest, Progress, read_manifest
from backlight.store.format.names import (
    ARRAYS,
    EVIDENCE,
    RANK_DOCUMENT,
    WATCHDOG_DATABASE,
    attempt_folder,
    columns_folders,
    document_name,
    parse_database,
    parse_piece,
)
from backlight.store.platform import atomic_json
from backlight.store.platform.filesystem import locked, refuse_links
from backlight.store.read.attempt_files import AttemptFiles, open_attempt


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
                    _refuse_running(run, progress)
            for part in parts:
                plan = _plan(run, manifest, Path(part))
                for source, target in plan.files:
                    target.parent.mkdir(exist_ok=True)
                    atomic_files.copy(source, target)
                for target, document in plan.documents.items():
                    atomic_json.write_document(target, document)
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
        _refuse_running(part, entry.progress)
        own = launches.get(entry.launch)
        if own is None:
            raise RunExistsError(
                f"{part}: attempt {entry.index} belongs to launch {entry.launch!r}, of which {run} has no "
                f"attempt (it has {', '.join(map(repr, launches)) or 'none'}); join it to the run of its "
                "rank 0"
            )
        opened = open_attempt(part, entry, other.run_id)
        for progress in opened.progress.values():
            _refuse_running(part, progress)
        _plan_attempt(run, own, opened, out)
    return out


def _plan_attempt(run: Path, own: AttemptEntry, opened: AttemptFiles, out: _Plan) -> None:
    target = run / attempt_folder(own.index)
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
                if atomic_json.read_document(existing) != codec.plain(document):
                    raise _conflict(existing, source)
                continue
            out.documents[existing] = document
            out.ranks.setdefault(own.index, []).append(rank)
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
    document = atomic_json.read_document(source)
    progress = opened.progress.get(rank)
    if progress is None:
        raise RunFormatError(f"{source}: holds no progress of its rank; it is damaged")
    stated: dict[str, Any] = codec.plain(progress)
    stated["files"] = {
        str(PurePosixPath(folder, *PurePosixPath(name).parts[1:])): last
        for name, last in stated["files"].items()
    }
    return document | {"progress": stated}


def _refuse_running(path: Path, progress: Progress) -> None:
    if progress.status_now() is RunStatus.RUNNING:
        who = f"process {progress.process.pid} on {progress.process.host}"
        raise RunExistsError(f"{path}: is still being written by {who}; join it when that has ended")


def _conflict(existing: Path, source: Path) -> RunExistsError:
    return RunExistsError(
        f"{existing}: exists with another content than {source}; nothing was copied from there"
    )
