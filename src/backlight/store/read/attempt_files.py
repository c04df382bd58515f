"""The files of one attempt: opened, compared with what each rank stated, their arrays and evidence."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight import codec
from backlight.records import EVERYTHING, FROM_HERE_ON, OTHERS, UNMEASURED, Fingerprint, RunStatus
from backlight.store.errors import RunFormatError
from backlight.store.format.arrays import ArrayInfo, Stack, decoded, read_piece
from backlight.store.format.manifest import AttemptEntry, Progress, read_document
from backlight.store.format.names import (
    ARRAYS,
    EVIDENCE,
    RANK_DOCUMENT,
    attempt_folder,
    columns_folders,
    document_name,
    parse_database,
    parse_piece,
    pieces,
    unmerged,
    watchdog_files,
)
from backlight.store.format.schema import DISK_LIMIT, DROPPED, NOT_STORED, WATCHDOG_RANK
from backlight.store.read.columnar import ColumnarDataset, ColumnarRank
from backlight.store.read.rank_file import RankFile, check_identity, open_rank_file
from backlight.text import count, visible

_MAX_NAMED_RANKS = 16
_MAX_HELD_FILES = 16
"""Connections of more files are opened for each query: a run of a thousand ranks has as many files."""

_ARRAY_TRIES = 12


@dataclass(slots=True)
class AttemptFiles:
    """The readable files of an attempt, the progress that each rank stated, and what is lost of it.

    ``endings`` are what is lost by how ranks ended.
    """

    entry: AttemptEntry
    folder: Path
    run_id: str
    files: list[RankFile] = field(default_factory=list)
    watchdogs: list[RankFile] = field(default_factory=list)
    progress: dict[int, Progress] = field(default_factory=dict)
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)
    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    unreadable: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with at least one readable file."""
        return tuple(sorted({file.rank for file in self.files}))


def open_attempt(run: Path, entry: AttemptEntry, run_id: str, *, folder: Path | None = None) -> AttemptFiles:
    """Open the files of one attempt of ``run``; those of another run are left out and stated as losses.

    ``folder`` is another path to the folder of the attempt, where one is held open.
    """
    out = AttemptFiles(entry, folder or run / attempt_folder(entry.index), run_id)
    out.progress[entry.first] = entry.progress
    if not out.folder.is_dir():
        out.losses.append(f"attempt {entry.index}: its folder {out.folder.name} is missing")
        return out
    children = sorted(p.name for p in out.folder.iterdir())
    databases = {name: parsed for name in children if (parsed := parse_database(name)) is not None}
    documented = {int(match[1]) for name in children if (match := RANK_DOCUMENT.fullmatch(name))}
    dataset = _open_dataset(out)
    if dataset is not None:  # it replaces the databases that an interrupted compaction left
        out.files += [
            ColumnarRank(dataset, rank, attempt=entry.index, step_offset=entry.step_offset)
            for rank in dataset.index.ranks
        ]
        columnar_ranks = out.ranks
        databases = {name: parsed for name, parsed in databases.items() if parsed[0] not in columnar_ranks}
    names = unmerged(databases.items())
    for rank in sorted({*documented, *(rank for rank, _, _ in databases.values())}):
        _open_document(out, rank)
    for name in names:
        rank = databases[name][0]
        progress = out.progress.get(rank)
        live = (
            progress is not None and progress.status is RunStatus.RUNNING and progress.process.alive() is True
        )
        is_own = live and progress is not None and progress.process.pid == os.getpid()
        hold = len(names) <= _MAX_HELD_FILES
        opened = _open_file(out, out.folder / name, rank, live=live, is_own=is_own, hold=hold)
        out.files += opened
        out.unreadable += not opened
    for path in watchdog_files(out.folder):
        # Whether its writer lives is not stated anywhere: file and log are copied, which is always safe.
        out.watchdogs += _open_file(out, path, WATCHDOG_RANK, hold=True)
    _state_losses(out)
    return out


def _open_file(out: AttemptFiles, path: Path, rank: int, **how: bool) -> list[RankFile]:
    """Return a file, or nothing and a loss where it cannot be read; ``how`` is as for a snapshot."""
    try:
        return [open_rank_file(path, rank, out.entry, out.run_id, **how)]
    except RunFormatError as error:
        out.losses.append(str(error))
        return []


def _open_dataset(out: AttemptFiles) -> ColumnarDataset | None:
    """Return the columnar dataset of an attempt, or None and a loss where it cannot be read."""
    folders = columns_folders(out.folder)
    if not folders:
        return None
    try:
        dataset = ColumnarDataset(folders[-1])
        stated = {"run_id": dataset.index.run_id, "launch": dataset.index.launch}
        check_identity(folders[-1], stated, -1, out.run_id, out.entry.launch)
    except RunFormatError as error:
        out.losses.append(str(error))
        out.unreadable += 1
        return None
    return dataset


def _open_document(out: AttemptFiles, rank: int) -> None:
    path = out.folder / document_name(rank)
    if not path.exists():
        return
    try:
        data = read_document(path)
        check_identity(path, data, rank, out.run_id, out.entry.launch)
        if data.get("fingerprint") is not None:
            out.fingerprints[rank] = codec.convert(data["fingerprint"], Fingerprint)
        if rank != out.entry.first and data.get("progress") is not None:
            out.progress[rank] = codec.convert(data["progress"], Progress)
        if data.get("options"):
            out.options[rank] = dict(data["options"])
    except RunFormatError as error:
        out.losses.append(str(error))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        out.losses.append(f"{path}: is damaged: {type(error).__name__}: {error}")


def _state_losses(out: AttemptFiles) -> None:
    """Compare the files that each rank stated with those that exist."""
    entry = out.entry
    present = {file.rank for file in out.files}
    accounted = present | set(out.progress)
    missing = itertools.islice(
        (rank for rank in range(entry.world_size) if rank not in accounted), _MAX_NAMED_RANKS
    )
    for rank in missing:
        out.losses.append(f"attempt {entry.index}: rank {rank} of {entry.world_size} left no file")
    if entry.first:
        out.losses.append(
            f"attempt {entry.index}: this folder holds only the ranks of {entry.progress.process.host}, "
            "which could not reach the run of rank 0; add it there with `backlight join RUN PART`"
        )
    out.losses += differences(entry.index, out.options)
    for rank, progress in sorted(out.progress.items()):
        out.endings += _status_losses(entry, rank, progress)
        rows: dict[str, Mapping[str, int]] = {f.path.name: f.last for f in out.files if f.rank == rank}
        is_columnar = any(isinstance(f, ColumnarRank) for f in out.files if f.rank == rank)
        for name, stated in progress.files.items():
            if is_columnar and parse_database(PurePosixPath(name).name) is not None:
                continue  # a compaction that was interrupted has already verified and removed it
            loss = _file_loss(out.folder, PurePosixPath(name), stated, rows)
            if loss:
                out.losses.append(f"attempt {entry.index}, rank {rank}: {loss}")
        if not progress.files and rank not in present and not out.unreadable and not progress.local:
            out.losses.append(
                f"attempt {entry.index}: rank {rank} left no data, it ended before its first flush"
            )


def differences(attempt: int, options: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a message for each group of ranks that recorded with other options than the first one."""
    if len(options) < 2:
        return []
    first = min(options)
    ranks_by_difference: dict[str, list[int]] = {}
    for rank in sorted(options):
        other = [
            f"{key} {_shown(options[rank].get(key))} instead of {_shown(value)}"
            for key, value in options[first].items()
            if options[rank].get(key) != value
        ]
        if other:
            ranks_by_difference.setdefault(", ".join(other), []).append(rank)
    out = []
    for what, ranks in ranks_by_difference.items():
        more = f" and {len(ranks) - _MAX_NAMED_RANKS} more" if len(ranks) > _MAX_NAMED_RANKS else ""
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_NAMED_RANKS]))}{more}"
        out.append(
            f"attempt {attempt}: {who} did not record what rank {first} did: {what}; sharded parameters are"
            " measured only where all ranks recorded"
        )
    return out


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _status_losses(entry: AttemptEntry, rank: int, progress: Progress) -> list[str]:
    who = f"attempt {entry.index}, rank {rank}"
    out = []
    if progress.lost:
        stored = entry.step_offset + progress.stored
        after = f"after step {stored}" if progress.stored >= 0 else "before its first step"
        out.append(f"{who}: recording stopped {after}: {progress.lost}")
    status = progress.status_now()
    interval = f"up to one flush interval ({entry.flush_interval:g} s)"
    if status is RunStatus.KILLED:
        out.append(f"{who}: its process was killed; {interval} of what it recorded last is lost")
    elif status is RunStatus.UNKNOWN:
        where = f"process {progress.process.pid} on {progress.process.host}"
        out.append(
            f"{who}: whether {where} still runs is not observable from here; if not, {interval} is lost"
        )
    if progress.local and status is not RunStatus.RUNNING:
        out.append(
            f"{who}: unpublished rows are on {progress.process.host} in {progress.local};"
            " run `backlight compact` there to recover them"
        )
    return out


def _file_loss(
    folder: Path, name: PurePosixPath, stated: Mapping[str, int], rows: Mapping[str, Mapping[str, int]]
) -> str:
    """Return what one file lacks of what was stated, empty where it lacks nothing."""
    if name.parts[1:] == (name.name,) and parse_database(name.name) is not None:
        if name.name not in rows:
            if _is_merged(folder / name.name):
                return ""
            rest = ", ".join(f"{last} rows of {table}" for table, last in stated.items())
            what = "cannot be read" if (folder / name.name).exists() else "is missing"
            return f"{name} {what}: lost are {rest or 'no known rows'}"
        short = [
            f"{rows[name.name].get(table, 0)} of {last} rows of {table}"
            for table, last in stated.items()
            if rows[name.name].get(table, 0) < last
        ]
        why = "it was copied without its -wal file, or truncated"
        return f"{name} holds only {', '.join(short)}: {why}" if short else ""
    if name.parts[1:] == (ARRAYS, name.name) and parse_piece(name.name) is not None:
        path = folder / ARRAYS / name.name
        if path.exists():
            size, expected = path.stat().st_size, stated.get("bytes", 0)
            return "" if size >= expected else f"{name} has only {size} of {expected} bytes"
        return "" if _is_merged(path) else f"{name} is missing"
    return ""


def _is_merged(path: Path) -> bool:
    """Return whether a merged file replaces this one."""
    parse = parse_database if path.suffix == ".db" else parse_piece
    mine = parse(path.name)
    if mine is None or not path.parent.is_dir():
        return False
    for other in path.parent.iterdir():
        theirs = parse(other.name)
        if theirs is not None and theirs[0] == mine[0] and theirs[1] <= mine[1] and mine[2] <= theirs[2]:
            return other != path
    return False


def array_infos(
    opened: Sequence[AttemptFiles], losses: dict[str, None], name: str | None = None
) -> list[ArrayInfo]:
    """Return the descriptions of all stored arrays, or of one, oldest first; errors go to ``losses``."""
    return [stack.info for attempt in opened for _, stack in _stacks(attempt, name, losses, values=False)]


def array_values(
    opened: Sequence[AttemptFiles], name: str, attempt: int | None, rank: int | None, losses: dict[str, None]
) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[Any]]]:
    """Return global steps and values of one array, joined over attempts and ranks."""
    merged: dict[int, npt.NDArray[Any]] = {}
    for files in opened:
        if attempt is not None and files.entry.index != attempt:
            continue
        mine: dict[int, tuple[int, npt.NDArray[Any]]] = {}
        for owner, stack in _stacks(files, name, losses, values=True):
            if rank is not None and owner != rank:
                continue
            for step, value in zip(stack.steps.tolist(), stack.values, strict=True):
                if step not in mine or owner <= mine[step][0]:
                    mine[step] = (owner, decoded(stack.info, np.asarray(value)))
        merged.update({step + files.entry.step_offset: value for step, (_, value) in mine.items()})
    order = sorted(merged)
    return np.array(order, dtype=np.int64), [merged[step] for step in order]


def evidence_paths(path: Path, opened: Sequence[AttemptFiles]) -> tuple[str, ...]:
    """Return the evidence files, by path below the run directory; links are not followed."""
    out = []
    for attempt in opened:
        folder = attempt.folder / EVIDENCE
        if folder.is_dir() and not folder.is_symlink():
            out += [
                p.relative_to(path).as_posix() for p in folder.iterdir() if p.is_file() and not p.is_symlink()
            ]
    return tuple(sorted(out))


def _stacks(
    opened: AttemptFiles, name: str | None, losses: dict[str, None], *, values: bool
) -> Iterator[tuple[int, Stack]]:
    for i in range(_ARRAY_TRIES):
        out: list[tuple[int, Stack]] = []
        problems = []
        for rank, path in pieces(opened.folder / ARRAYS):
            try:
                out += [(rank, stack) for stack in read_piece(path, name, values=values)]
            except RunFormatError as error:
                problems.append((path, str(error)))
        # A piece that vanished was merged by a living writer meanwhile: list them again.
        if i == _ARRAY_TRIES - 1 or all(path.exists() for path, _ in problems):
            losses.update(dict.fromkeys(text for _, text in problems))
            yield from out
            return


Payloads = Callable[[str], Sequence[tuple[int | None, Mapping[str, Any]]]]
"""Returns global step and payload of the events of a kind."""


def shortfall(attempts: Sequence[AttemptFiles], payloads: Payloads, *, is_damaged: bool) -> str:
    """Return what a run lacks, as ``recording stopped at step 256 of 2,500``; empty where it lacks nothing.

    Of an attempt that another one continues only what was lost while it ran counts, not how it ended.
    ``is_damaged`` is whether something is missing or unreadable that was stored.
    """
    otherwise = "a part of what was stored is missing" if is_damaged else ""
    return next(_reasons(attempts, payloads), otherwise)


def shortfall_of_first(entry: AttemptEntry, last_step: int) -> str:
    """Return what a run lacks by the progress of its first rank; ``last_step`` is the last in its files."""
    return _of_rank(entry, entry.first, entry.progress, last_step, is_last=True)


def _reasons(attempts: Sequence[AttemptFiles], payloads: Payloads) -> Iterator[str]:
    for attempt in attempts:
        is_last = attempt is attempts[-1]
        # How the others end once one has failed is no news.
        is_cut = is_last and attempt.entry.progress.status_now() is not RunStatus.FAILED
        for rank, progress in sorted(attempt.progress.items()):
            last = max((file.last_step for file in attempt.files if file.rank == rank), default=-1)
            if reason := _of_rank(attempt.entry, rank, progress, last, is_last=is_cut):
                yield reason
        if is_last and (missing := _missing_ranks(attempt)):
            yield missing
    yield from _of_events(payloads, is_whole=all(len(a.ranks) == a.entry.world_size > 1 for a in attempts))


def _of_rank(entry: AttemptEntry, rank: int, progress: Progress, last_step: int, *, is_last: bool) -> str:
    """Return where and why the recording of a rank stopped short; empty where it did not."""
    taken = max(last_step, entry.step_offset + progress.step)
    on_rank = f" on rank {rank}" if entry.world_size > 1 else ""
    if progress.lost:
        stored = entry.step_offset + progress.stored
        if progress.stored < 0:
            return f"nothing was recorded of {count(taken + 1, 'step')}{on_rank}"
        total = f" of {taken + 1:,}" if taken > stored else ""
        return f"recording stopped at step {stored:,}{total}{on_rank}"
    status = progress.status_now() if is_last else RunStatus.FINISHED
    at = f"step {taken:,}" if taken >= entry.step_offset else "the first step"
    match status:
        case RunStatus.RUNNING:
            return f"still running, at {at}{on_rank}"
        case RunStatus.KILLED:
            return f"recording stopped at {at}{on_rank}"
        case RunStatus.UNKNOWN:
            return f"recorded up to {at}{on_rank}, and how it ended is not known"
        case RunStatus.FAILED if rank != entry.first:
            return f"rank {rank} ended with an error at {at}"
    return ""


def _missing_ranks(attempt: AttemptFiles) -> str:
    """Return which ranks of an attempt left nothing; empty where all did, or only one rank exists."""
    size, recorded = attempt.entry.world_size, {*attempt.ranks, *attempt.progress}
    missing = size - len(recorded)
    if missing <= 0 or size == 1:
        return ""
    if missing > 1:
        return f"{missing:,} of {size:,} ranks were not recorded"
    rank = next(rank for rank in range(size) if rank not in recorded)
    return f"rank {rank} of {size:,} was not recorded"


def _of_events(payloads: Payloads, *, is_whole: bool = False) -> Iterator[str]:
    """Yield what the events of a run report as lost; ``is_whole`` is whether all ranks of a run are here."""
    for step, payload in payloads(UNMEASURED):
        what = visible(payload.get("what", "something"))
        if what == OTHERS and not is_whole:
            yield "other ranks were not recorded"
        elif text := payload.get("lacks"):
            yield visible(text)
        elif payload.get("lost"):
            at = "" if step is None else f" at step {step:,}"
            of = "" if what == EVERYTHING else f" of {what.removesuffix(FROM_HERE_ON)}"
            yield f"recording{of} stopped{at}"
    if dropped := sum(int(payload.get("steps", 0)) for _, payload in payloads(DROPPED)):
        yield f"{count(dropped, 'recorded step')} could not be stored: the disk is too slow"
    if any(True for _ in payloads(NOT_STORED)):
        yield "a part of what was recorded could not be stored"
    for step, payload in payloads(DISK_LIMIT):
        if not payload.get("stride", 1):
            yield "recording stopped at the disk limit" + ("" if step is None else f", at step {step:,}")


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank of an attempt, with the last global step that it took, recorded or not."""

    rank: int
    host: str
    status: RunStatus
    last_step: int
    ended: float | None


def states(opened: AttemptFiles) -> tuple[RankState, ...]:
    """Return how far each rank of an attempt came; a rank that left nothing is missing."""
    files = by_rank(opened.files)
    out = []
    for rank in sorted({*opened.progress, *files}):
        last = max((file.last_step for file in files.get(rank, ())), default=-1)
        progress = opened.progress.get(rank)
        if progress is None:
            out.append(RankState(rank, "", RunStatus.UNKNOWN, last, None))
            continue
        last = max(last, _stated_step(opened, progress))
        out.append(RankState(rank, progress.process.host, progress.status_now(), last, progress.ended))
    return tuple(out)


def last_step(opened: AttemptFiles) -> int:
    """Return the last global step that any rank of an attempt took, recorded or not; -1 for none."""
    recorded = [file.last_step for file in opened.files]
    stated = [_stated_step(opened, progress) for progress in opened.progress.values()]
    return max([*recorded, *stated], default=-1)


def _stated_step(opened: AttemptFiles, progress: Progress) -> int:
    """Return the last global step that a rank stated itself: with sampling, not the last recorded one."""
    return opened.entry.step_offset + progress.step if progress.step >= 0 else -1


def by_rank(files: Sequence[RankFile]) -> dict[int, list[RankFile]]:
    """Return the files of an attempt by rank: on some file systems a rank leaves several."""
    out: dict[int, list[RankFile]] = {}
    for file in files:
        out.setdefault(file.rank, []).append(file)
    return dict(sorted(out.items()))
