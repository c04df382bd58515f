"""Bringing the parts of a run together that hosts without a shared folder wrote each for itself.

Every rank has files of its own, so joining is copying: nothing is merged, and a file that is there already
with the same content is passed over, so that it can simply be done again.
"""

from __future__ import annotations

import filecmp
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from backlight.records import RunStatus, to_json
from backlight.store.errors import RunExistsError, RunFormatError, RunWriteError
from backlight.store.format.manifest import AttemptEntry, Manifest, Progress, attempt_folder, read_manifest
from backlight.store.platform import atomic_json
from backlight.store.platform.lock import locked
from backlight.store.read.attempt import OpenedAttempt, open_attempt
from backlight.store.write.attempt import document_name
from backlight.store.write.segments import bring, parse_name

_DOCUMENT = re.compile(r"rank-\d{5,9}\.json")
_WATCHDOG = re.compile(r"watchdog-.*\.db")


@dataclass(slots=True)
class Joined:
    """What joining brought: ``ranks`` by attempt of the run, and the number of files."""

    ranks: dict[int, list[int]] = field(default_factory=dict)
    files: int = 0


def join(run: str | Path, parts: list[Path]) -> Joined:
    """Copy into ``run`` what the ranks of other hosts wrote into ``parts``; the parts stay as they are.

    Raises
    ------
    RunExistsError
        If a process still writes one of the folders, a part belongs to another launch, or both hold another
        file of one rank. Nothing has been copied then.
    RunWriteError
        If the file system does not let us. A folder that is no run passes a RunFormatError through.
    """
    run = Path(run)
    out = Joined()
    try:
        with locked(run):
            manifest = read_manifest(run)
            for entry in manifest.attempts:
                for progress in open_attempt(run, entry).progress.values():
                    _refuse_running(run, progress)
            for part in parts:
                brought = _plan(run, manifest, Path(part))
                for source, target in brought.files:
                    target.parent.mkdir(exist_ok=True)
                    bring(source, target)
                for target, document in brought.documents.items():
                    atomic_json.write_atomically(target, atomic_json.dump(document).encode("ascii"))
                out.files += len(brought.files) + len(brought.documents)
                for attempt, ranks in brought.ranks.items():
                    out.ranks.setdefault(attempt, []).extend(ranks)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunWriteError(f"{run}: cannot be joined: {reason}; what is there still opens") from error
    return out


@dataclass(slots=True)
class _Brought:
    files: list[tuple[Path, Path]] = field(default_factory=list)
    documents: dict[Path, dict[str, Any]] = field(default_factory=dict)
    ranks: dict[int, list[int]] = field(default_factory=dict)


def _plan(run: Path, manifest: Manifest, part: Path) -> _Brought:
    """Return what is to be copied from one part; whatever can be refused is refused here.

    Raises
    ------
    RunExistsError
        If the part is of another launch, or still written.
    """
    theirs = read_manifest(part)
    if part.resolve() == run.resolve():
        raise RunExistsError(f"{part}: is the run itself; give the folders that other hosts wrote")
    launches = {entry.launch: entry for entry in manifest.attempts}
    out = _Brought()
    for entry in theirs.attempts:
        _refuse_running(part, entry.progress)
        mine = launches.get(entry.launch)
        if mine is None:
            raise RunExistsError(
                f"{part}: attempt {entry.index} belongs to launch {entry.launch!r}, of which {run} has no "
                f"attempt (it has {', '.join(map(repr, launches)) or 'none'}); join it to the run of its "
                "rank 0"
            )
        opened = open_attempt(part, entry)
        for progress in opened.progress.values():
            _refuse_running(part, progress)
        _plan_attempt(run, mine, opened, out)
    return out


def _plan_attempt(run: Path, mine: AttemptEntry, theirs: OpenedAttempt, out: _Brought) -> None:
    target = run / attempt_folder(mine.index)
    if not theirs.folder.is_dir():
        return
    for source in sorted(p for p in theirs.folder.rglob("*") if p.is_file()):
        below = source.relative_to(theirs.folder)
        if atomic_json.is_temporary(source.name) or not _ours(below):
            continue
        if _DOCUMENT.fullmatch(below.name) and len(below.parts) == 1:
            rank = int(below.stem.removeprefix("rank-"))
            document = _document(source, theirs, rank, target.name)
            there = target / document_name(rank)
            if there.exists():
                if atomic_json.read_document(there) != to_json(document):
                    raise _conflict(there, source)
                continue
            out.documents[there] = document
            out.ranks.setdefault(mine.index, []).append(rank)
        elif (target / below).exists():
            if not filecmp.cmp(source, target / below, shallow=False):
                raise _conflict(target / below, source)
        else:
            out.files.append((source, target / below))


def _ours(below: Path) -> bool:
    if len(below.parts) == 1:
        name = below.name.removesuffix("-wal")
        return bool(parse_name(name) or _WATCHDOG.fullmatch(name) or _DOCUMENT.fullmatch(name))
    return len(below.parts) == 2 and below.parts[0] in {"arrays", "evidence"}


def _document(source: Path, theirs: OpenedAttempt, rank: int, folder: str) -> dict[str, Any]:
    """Return the document of a rank as the run is to hold it: with its progress, files by their new paths.

    Raises
    ------
    RunFormatError
        If the part lost what the rank said of its progress.
    """
    document = atomic_json.read_document(source)
    progress = theirs.progress.get(rank)
    if progress is None:
        raise RunFormatError(f"{source}: does not say how far its rank got; it is damaged")
    stated: dict[str, Any] = to_json(progress)
    stated["files"] = {
        str(PurePosixPath(folder, *PurePosixPath(name).parts[1:])): last
        for name, last in stated["files"].items()
    }
    return document | {"progress": stated}


def _refuse_running(path: Path, progress: Progress) -> None:
    if progress.status_now() is RunStatus.RUNNING:
        who = f"process {progress.process.pid} on {progress.process.host}"
        raise RunExistsError(f"{path}: is still being written by {who}; join it when that has ended")


def _conflict(there: Path, source: Path) -> RunExistsError:
    return RunExistsError(
        f"{there}: exists with another content than {source}; nothing was copied from there"
    )
