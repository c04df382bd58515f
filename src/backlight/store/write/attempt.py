"""How a process enters a run directory: as a new run, a new attempt of one, or a further rank."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backlight.distributed import JOB_SEPARATOR
from backlight.records import RunStatus
from backlight.store.errors import RunExistsError, RunFormatError, RunWriteError
from backlight.store.format.manifest import (
    MANIFEST,
    AttemptEntry,
    Manifest,
    Progress,
    attempt_folder,
    read_manifest,
)
from backlight.store.format.names import safe_name
from backlight.store.platform import atomic_json
from backlight.store.platform.lock import CLAIM, locked
from backlight.store.platform.process import ProcessIdentity

JOIN_TIMEOUT = 60.0
"""Seconds that a further rank waits for rank 0 to open the attempt."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a process says of the attempt that it opens; ``launch`` is shared by its ranks.

    ``first`` is the rank that opens it: 0, but in a part of a run.
    """

    name: str = ""
    launch: str | None = None
    world_size: int = 1
    script: str = ""
    arguments: tuple[str, ...] = ()
    monitors: tuple[str, ...] = ()
    groups: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, dict[str, float]] = field(default_factory=dict)
    flush_interval: float = 1.0
    step_offset: int | None = None
    first: int = 0


@dataclass(slots=True)
class Entry:
    """The place of a writer: its attempt's folder and its own progress.

    ``made`` are folders and ``previous`` the manifest from before, for :meth:`undo`.
    """

    path: Path
    manifest: Manifest
    attempt: AttemptEntry
    progress: Progress
    made: list[Path] = field(default_factory=list)
    previous: bytes | None = None
    first: bool = False

    @property
    def folder(self) -> Path:
        """Return the folder of the attempt."""
        return self.path / attempt_folder(self.attempt.index)

    def undo(self) -> None:
        """Take back what entering the folder did, as far as the file system lets us."""
        if self.first:
            with contextlib.suppress(OSError):
                if self.previous is None:
                    (self.path / MANIFEST).unlink(missing_ok=True)
                else:
                    atomic_json.write_atomically(self.path / MANIFEST, self.previous)
        if self.folder in self.made:
            shutil.rmtree(self.folder, ignore_errors=True)
        _remove_empty(self.made)


def job_of(launch: str) -> str:
    """Return what all starts of one job have in common: the id of a launch without its restart."""
    return launch.rpartition(JOB_SEPARATOR)[0] or launch


def database_name(rank: int) -> str:
    """Return the name of the database of a rank."""
    return f"rank-{rank:05d}.db"


def document_name(rank: int) -> str:
    """Return the name of the document of a rank."""
    return f"rank-{rank:05d}.json"


def enter_as_first(path: Path, opening: Opening) -> Entry:
    """Open a new attempt as its first rank; where that fails, nothing stays behind.

    Raises
    ------
    RunWriteError
        If the file system does not let us.
    RunExistsError
        If the folder holds something else, or a living process writes the run. One that this
        release cannot read passes a RunFormatError through.
    """
    with _entering(path) as made:
        return _open_attempt(path, opening, made)


def part_path(path: Path) -> Path:
    """Return where the ranks of this host write where they do not see the folder of rank 0."""
    return path.with_name(f"{path.name}.part-{safe_name(socket.gethostname()) or 'host'}")


def enter_apart(path: Path, opening: Opening) -> Entry:
    """Open the part of a run that this host keeps for itself, or join it; ``path`` is the part's folder.

    Parts are runs of their own that lack the other ranks, until they are joined.

    Raises
    ------
    RunWriteError
        If the file system does not let us. RunExistsError and RunFormatError as in :func:`enter_as_first`.
    """
    with _entering(path) as made:
        if (path / MANIFEST).exists():
            joined = _joined(path, read_manifest(path), opening.first, opening.launch)
            if joined is not None:
                return joined
        return _open_attempt(path, opening, made)


@contextlib.contextmanager
def _entering(path: Path) -> Iterator[list[Path]]:
    """Hold the lock of a folder, which is made where it is missing; give the folders that were made.

    Raises
    ------
    RunWriteError
        If the file system does not let us; of an error inside as well, no empty folder stays behind.
    """
    made: list[Path] = []
    try:
        _make(path, made)
        with locked(path):
            yield made
    except OSError as error:
        _remove_empty(made)
        reason = error.strerror or str(error)
        raise RunWriteError(f"{path}: cannot be written: {reason}; choose another --out") from error
    except BaseException:
        _remove_empty(made)
        raise


def _make(path: Path, made: list[Path]) -> None:
    """Make the folder and its parents, and note which ones were missing.

    Raises
    ------
    RunExistsError
        If a file is there.
    """
    for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
        # Where another process makes the same folder at this moment, it is not ours to remove.
        with contextlib.suppress(FileExistsError):
            missing.mkdir()
            made.append(missing)
    if not path.is_dir():
        raise RunExistsError(f"{path}: is a file, expected a folder; choose another --out")


def _open_attempt(path: Path, opening: Opening, made: list[Path]) -> Entry:
    manifest = _existing(path, opening.launch)
    previous = None if manifest is None else (path / MANIFEST).read_bytes()
    offset = opening.step_offset
    if manifest is None:
        manifest = Manifest.new(opening.name, opening.launch)
    elif offset is None:
        offset = _next_step(path)
    index = max((entry.index for entry in manifest.attempts), default=-1) + 1
    while (path / attempt_folder(index)).exists() and any((path / attempt_folder(index)).iterdir()):
        index += 1
    now = time.time()
    progress = Progress(RunStatus.RUNNING, ProcessIdentity.of_this_process(), updated=now)
    attempt = AttemptEntry(
        index=index,
        step_offset=offset or 0,
        started=now,
        world_size=opening.world_size,
        launch=opening.launch or uuid.uuid4().hex,
        script=opening.script,
        argv=opening.arguments,
        monitors=opening.monitors,
        flush_interval=opening.flush_interval,
        progress=progress,
        first=opening.first,
    )
    for earlier in manifest.attempts:
        if earlier.progress.status is RunStatus.RUNNING:
            earlier.progress.status = earlier.progress.status_now()
    manifest.attempts.append(attempt)
    manifest.groups.update(opening.groups)
    manifest.overrides.update(opening.overrides)
    entry = Entry(path, manifest, attempt, progress, made, previous, first=True)
    if not entry.folder.exists():
        entry.folder.mkdir()
        made.append(entry.folder)
    # The manifest comes before the files: whenever a kill falls, the folder is empty or a run.
    manifest.write(path)
    return entry


def enter_as_further(path: Path, *, rank: int, launch: str | None, timeout: float = JOIN_TIMEOUT) -> Entry:
    """Enter, as rank > 0, the attempt that rank 0 of the same launch opens.

    Raises
    ------
    RunExistsError
        If no such attempt appears in time.
    ValueError
        If the launch is not named.
    """
    if not launch:
        msg = f"rank {rank} joins the run of rank 0 and needs its run_id; give all ranks the same one"
        raise ValueError(msg)
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(RunFormatError):
            manifest = read_manifest(path)
            joined = _joined(path, manifest, rank, launch)
            if joined is not None:
                return joined
        if time.monotonic() > deadline:
            msg = (
                f"{path}: rank {rank} found no running attempt of launch {launch!r} within {timeout:g} s;"
                " rank 0 opens it: start rank 0 with the same run_id and the same folder"
            )
            raise RunExistsError(msg)
        time.sleep(0.02)


def _joined(path: Path, manifest: Manifest, rank: int, launch: str | None) -> Entry | None:
    """Return the place of a rank in the running attempt of its launch, None where there is none."""
    newest = manifest.attempts[-1] if manifest.attempts else None
    # An attempt that already has this rank is an earlier start of the same launch.
    if (
        newest is None
        or newest.launch != launch
        or newest.progress.status_now() is not RunStatus.RUNNING
        or (path / attempt_folder(newest.index) / document_name(rank)).exists()
    ):
        return None
    progress = Progress(RunStatus.RUNNING, ProcessIdentity.of_this_process(), updated=time.time())
    return Entry(path, manifest, newest, progress)


def _existing(path: Path, launch: str | None) -> Manifest | None:
    """Return the manifest of the run at ``path``, or None where a new run may begin.

    Raises
    ------
    RunExistsError
        If the folder holds something else, or a living process writes the run.
    """
    if not (path / MANIFEST).exists():
        if any(not _leftover(child) for child in path.iterdir()):
            raise RunExistsError(f"{path}: is not a backlight run and not empty; choose another --out")
        return None
    manifest = read_manifest(path)
    for entry in manifest.attempts:
        progress = entry.progress
        if progress.status_now() is not RunStatus.RUNNING:
            continue
        if launch and job_of(launch) == job_of(entry.launch) and progress.process.alive() is None:
            # A job runs once: where it starts again, its earlier start on another machine is over.
            progress.status = RunStatus.KILLED
        else:
            who = f"process {progress.process.pid} on {progress.process.host}"
            msg = f"{path}: is still being written by {who} (attempt {entry.index}); choose another --out"
            raise RunExistsError(msg)
    return manifest


def _leftover(child: Path) -> bool:
    """Tell whether a kill between the first two moments of a run left this behind."""
    if atomic_json.is_temporary(child.name) or child.name == CLAIM:
        return True
    return child.name == attempt_folder(0) and child.is_dir() and not any(child.iterdir())


def _next_step(path: Path) -> int:
    """Return the global step after the last one that any attempt recorded."""
    from backlight.store.read.run import open_run  # noqa: PLC0415 - needed only where a run goes on

    return open_run(path).last_step() + 1


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders that we made, unless somebody has put something there meanwhile."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()
