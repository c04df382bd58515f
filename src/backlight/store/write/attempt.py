"""The attempt that a process writes: how it enters a run directory, and how it publishes its progress.

A process enters as a new run, a new attempt of one, or a further rank. The first rank states its progress in
``manifest.json``, which no other rank writes; a further rank in its own ``rank-NNNNN.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backlight import atomic_files, clock, codec, untrusted_files
from backlight.distributed import JOB_SEPARATOR, given_directory
from backlight.records import Fingerprint, RunStatus
from backlight.redaction import Redaction
from backlight.store.errors import RunExistsError, RunFormatError, RunHeldError, RunPathError, RunWriteError
from backlight.store.filesystem import CLAIM, ProcessIdentity, locked
from backlight.store.format.manifest import (
    HEARTBEAT_S,
    AttemptEntry,
    ListedSummary,
    Manifest,
    Progress,
    read_document,
    read_manifest,
    seal,
)
from backlight.store.format.names import MANIFEST, attempt_folder, document_name, safe_name
from backlight.store.format.schema import FORMAT_VERSION

JOIN_TIMEOUT_S = 60.0
"""Time that a further rank waits for rank 0 to open the attempt."""

RANK_KIND = "backlight rank"

_WRONG_PATH = {errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}

REFUSAL_S = 1.0
"""Time after which a further rank no longer waits where the file system refuses a new folder."""

MAX_PUBLISH_SHARE = 1 / 20
"""Share of the writer thread's time that publishing progress may take, on any disk."""


@dataclass(slots=True)
class Entry:
    """One rank inside its attempt, which publishes its progress about every flush interval.

    ``created`` are folders and ``previous`` the manifest from before, for :meth:`undo`. ``earlier`` is the
    fingerprint that the model of a resumed run must have, None where none is expected.
    """

    path: Path
    manifest: Manifest
    attempt: AttemptEntry
    progress: Progress
    rank: int
    created: list[Path] = field(default_factory=list)
    previous: bytes | None = None
    earlier: Fingerprint | None = None
    options: dict[str, Any] = field(default_factory=dict)
    redaction: Redaction = field(default_factory=Redaction)
    interval_s: float = 0.0
    _fingerprint: str = "null"
    _is_document_due: bool = False
    _published: float = 0.0
    _cost_s: float = 0.0
    _stale: bool = True

    @property
    def folder(self) -> Path:
        """Folder of the attempt."""
        return self.path / attempt_folder(self.attempt.index)

    @property
    def is_first(self) -> bool:
        """Whether this rank opened the attempt and so writes the manifest."""
        return self.rank == self.attempt.first

    def undo(self) -> None:
        """Undo the changes of entering the folder, as far as the file system allows."""
        if self.is_first:
            with contextlib.suppress(OSError):
                if self.previous is None:
                    (self.path / MANIFEST).unlink(missing_ok=True)
                else:
                    atomic_files.write(self.path / MANIFEST, self.previous)
            # It was empty, or not there, when this rank entered it.
            shutil.rmtree(self.folder, ignore_errors=True)
        _remove_empty(self.created)

    def set_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Store the fingerprint of the rank; an OSError passes through."""
        self._fingerprint = codec.encode(self.redaction.fingerprint(fingerprint))
        self._is_document_due = True
        self.publish_document()

    def update(self, files: dict[str, dict[str, int]], step: int = -1) -> None:
        """Set the last rows of each file and the last attempt-local step, to be published."""
        self.progress.files = files
        self.progress.step = max(self.progress.step, step)
        self._stale = True

    def publish_if_due(self) -> None:
        """Publish an update, or a heartbeat, where it is time; an OSError passes through."""
        waited = clock.monotonic() - self._published
        interval = max(self.interval_s, self._cost_s / MAX_PUBLISH_SHARE)
        if (self._stale and waited >= interval) or waited >= HEARTBEAT_S:
            self.publish()

    def publish(self) -> None:
        """Publish the progress now; an OSError passes through."""
        began = clock.monotonic()
        self.progress.updated = clock.system_time()
        if self.is_first:
            self.manifest.write(self.path)
        if not self.is_first or self._is_document_due:
            self.publish_document()
        self._published = clock.monotonic()
        self._cost_s = self._published - began
        self._stale = False

    def end(self, status: RunStatus, summary: ListedSummary) -> None:
        """Publish how the attempt ended, once its files are closed; an OSError passes through."""
        self.progress.status, self.progress.ended = status, clock.unix_time()
        if self.is_first:
            with contextlib.suppress(OSError):
                if (state := self.attempt.database_state(self.path)) is not None:
                    size, changed = state
                    self.attempt.summary = dataclasses.replace(summary, size=size, changed=changed)
        self.publish()

    def publish_document(self) -> None:
        """Write ``rank-NNNNN.json``; an OSError passes through."""
        head = {
            "kind": RANK_KIND,
            "format": FORMAT_VERSION,
            "run_id": self.manifest.run_id,
            "attempt": self.attempt.index,
            "launch": self.attempt.launch,
            "rank": self.rank,
            "progress": None if self.is_first else self.progress,
            "options": self.options,
        }
        # The fingerprint may hold thousands of modules; it is serialised once.
        text = f'{codec.encode(head)[:-1]}, "fingerprint": {self._fingerprint}}}'
        atomic_files.write(self.folder / document_name(self.rank), seal(text))
        self._is_document_due = False


def default_path(script: str = "", launch: str | None = None) -> Path:
    """Return ``runs/<script>-<time>``, with a number where that exists.

    Ranks of one launch need the same folder without communicating, and their clocks differ: given ``launch``,
    which they share, the folder is ``runs/<script>-<its hash>``; a restart of the same job has the same one.
    A launcher that has chosen the folder takes precedence.
    """
    chosen = given_directory()
    if chosen is not None:
        return Path(chosen)
    name = Path(script or (sys.argv[0] if sys.argv else "")).name.removesuffix(".py")
    stem = safe_name(name or "training")
    if launch is not None:
        return Path("runs") / f"{stem}-{hashlib.sha256(job_of(launch).encode()).hexdigest()[:8]}"
    path = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(free for free in _numbered(path) if not free.exists())


def _numbered(path: Path) -> Iterator[Path]:
    """Yield ``path``, ``path-2``, ``path-3``, ..."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def job_of(launch: str) -> str:
    """Return what all starts of one job share: the id of a launch without its restart."""
    return launch.rpartition(JOB_SEPARATOR)[0] or launch


def own_path(path: Path, launch: str) -> Path:
    """Return the folder that one launch of a job takes where ``path``, the folder of the job, is taken."""
    suffix = f"-{safe_name(launch.rpartition(JOB_SEPARATOR)[2])[:8]}"
    return path if path.name.endswith(suffix) else path.with_name(path.name + suffix)


def part_path(path: Path) -> Path:
    """Return the folder for the ranks of this host where they cannot reach the folder of rank 0."""
    return path.with_name(f"{path.name}.part-{safe_name(socket.gethostname()) or 'host'}")


def enter(
    path: Path,
    new: Manifest,
    step_offset: int | None,
    *,
    launch: str | None,
    join_timeout: float | None = None,
    otherwise: Path | None = None,
    resume: bool = False,
    numbered: bool = False,
    share: bool = False,
) -> tuple[Entry, str]:
    """Enter the attempt of ``own`` as its first rank says; return why this host keeps its part, if it does.

    ``otherwise`` is the directory for all ranks where ``path`` cannot take this run.

    Raises
    ------
    RunExistsError
        If no directory can take it.
    """
    rank, world_size = new.attempts[0].first, new.attempts[0].world_size
    if rank == 0:
        try:
            return enter_first(path, new, step_offset, resume=resume, numbered=numbered, share=share), ""
        except RunExistsError:
            if otherwise is None:
                raise
            return enter_first(otherwise, new, step_offset, numbered=world_size == 1, share=share), ""
    timeout_s = JOIN_TIMEOUT_S if join_timeout is None else join_timeout
    try:
        return enter_further(path, rank=rank, launch=launch, timeout_s=timeout_s, otherwise=otherwise), ""
    except RunExistsError as error:
        if join_timeout is None:
            raise
        return enter_first(part_path(path), new, step_offset, resume=resume, share=share), str(error)


def enter_first(
    path: Path,
    new: Manifest,
    step_offset: int | None,
    *,
    resume: bool = False,
    numbered: bool = False,
    share: bool = False,
) -> Entry:
    """Open the attempt of ``own`` as its first rank; on failure nothing is left behind.

    A rank above 0 opens the part of the run that this host keeps for itself, or joins it. A run that is there
    already is continued by a restart of its job, or with ``resume``. With ``numbered`` the directory is a new
    one: the next number where another process has just created it. Others enter it only with ``share``.
    """
    names = _numbered(path) if numbered else iter([path])
    while True:
        free = next(names)
        with contextlib.suppress(_TakenError), _entering(free, new=numbered, share=share) as created:
            if new.attempts[0].first and (free / MANIFEST).exists():
                joined = _joined(free, new.attempts[0].first, new.attempts[0].launch)
                if joined is not None:
                    return joined
            return _open_attempt(free, new, step_offset, created, resume=resume)


def enter_further(
    path: Path,
    *,
    rank: int,
    launch: str | None,
    timeout_s: float = JOIN_TIMEOUT_S,
    otherwise: Path | None = None,
) -> Entry:
    """Enter, as rank > 0, the attempt that rank 0 of the same launch opens in ``path`` or ``otherwise``."""
    if not launch:
        raise ValueError(
            f"rank {rank} joins the run of rank 0 and needs its run_id; give all ranks the same one"
        )
    began = clock.monotonic()
    while True:
        for folder in (path, otherwise):
            with contextlib.suppress(RunFormatError):
                joined = None if folder is None else _joined(folder, rank, launch)
                if joined is not None:
                    return joined
        waited = clock.monotonic() - began
        if waited > REFUSAL_S and (reason := _refusal(path)):
            raise RunWriteError(f"{path}: cannot be written: {reason}; choose another --out")
        if waited > timeout_s:
            raise RunExistsError(
                f"{path}: rank {rank} found no running attempt of launch {launch!r} within {timeout_s:g} s;"
                " rank 0 opens it: start rank 0 with the same run_id and the same folder"
            )
        clock.sleep(0.02)


def _refusal(path: Path) -> str:
    """Return why no folder can be made at ``path``, on a disk that all ranks share; empty where it can."""
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    facts = os.statvfs(parent)
    if facts.f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    if not facts.f_bfree:
        return os.strerror(errno.ENOSPC)
    return "" if os.access(parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


class _TakenError(Exception):
    """Another process has created the new folder."""


@contextlib.contextmanager
def _entering(path: Path, *, new: bool = False, share: bool = False) -> Iterator[list[Path]]:
    """Create a folder, hold its lock and yield the folders that were created; on failure remove those."""
    created: list[Path] = []
    try:
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            # Where another process creates the same folder at this moment, that one removes it.
            with contextlib.suppress(FileExistsError):
                missing.mkdir(0o777 if share or missing != path else 0o700)
                created.append(missing)
        # Of several processes that create the same folder, one gets it.
        if new and path not in created:
            raise _TakenError
        if not path.is_dir():
            raise RunExistsError(f"{path}: is a file, expected a folder; choose another --out")
        with locked(path):
            yield created
    except OSError as error:
        _remove_empty(created)
        reason = error.strerror or str(error)
        kind = RunPathError if error.errno in _WRONG_PATH else RunWriteError
        raise kind(f"{path}: cannot be written: {reason}; choose another --out") from error
    except BaseException:
        _remove_empty(created)
        raise


def _open_attempt(
    path: Path, new: Manifest, step_offset: int | None, created: list[Path], *, resume: bool
) -> Entry:
    """Add the attempt of ``own`` to the run at ``path``, after its last step unless an offset is given."""
    (attempt,) = new.attempts
    manifest = _existing_run(path, attempt, resume=resume) or new
    previous = earlier = None
    if manifest is not new:
        earlier = _expected_fingerprint(path, manifest.attempts, attempt, attempt.first)
        previous = untrusted_files.read(path / MANIFEST)
        if step_offset is None:
            from backlight.store.read.run import open_run  # noqa: PLC0415 - needed only where a run goes on

            step_offset = open_run(path).last_step() + 1
        for entry in manifest.attempts:
            entry.progress.status = entry.progress.status_now()
        attempt.index = max((entry.index for entry in manifest.attempts), default=-1) + 1
        manifest.attempts.append(attempt)
        manifest.groups.update(new.groups)
        manifest.overrides.update(new.overrides)
    attempt.step_offset = step_offset or 0
    entered = Entry(path, manifest, attempt, attempt.progress, attempt.first, created, previous, earlier)
    while entered.folder.exists() and any(entered.folder.iterdir()):
        attempt.index += 1
    if not entered.folder.exists():
        entered.folder.mkdir()
        created.append(entered.folder)
    # The manifest comes before the files: after a kill at any moment, the folder is empty or a run.
    manifest.write(path)
    return entered


def _joined(path: Path, rank: int, launch: str) -> Entry | None:
    """Return the entry of a rank into the running attempt of its launch, None where there is none."""
    manifest = read_manifest(path)
    newest = manifest.attempts[-1] if manifest.attempts else None
    # An attempt that already has this rank is an earlier start of the same launch.
    if (
        newest is None
        or newest.launch != launch
        or newest.progress.status_now() is not RunStatus.RUNNING
        or (path / attempt_folder(newest.index) / document_name(rank)).exists()
    ):
        return None
    earlier = _expected_fingerprint(path, manifest.attempts[:-1], newest, rank)
    return Entry(path, manifest, newest, Progress.begin(), rank, earlier=earlier)


def _existing_run(path: Path, new: AttemptEntry, *, resume: bool) -> Manifest | None:
    """Return the manifest of the run at ``path``, None where a new run may begin, or refuse the folder."""
    if not (path / MANIFEST).exists():
        if any(not _is_leftover(child) for child in path.iterdir()):
            raise RunExistsError(f"{path}: is not a backlight run and not empty; choose another --out")
        return None
    manifest = read_manifest(path)
    for entry in manifest.attempts:
        progress = entry.progress
        if progress.status_now() is not RunStatus.RUNNING:
            continue
        if _is_restart(new, entry) and progress.process.alive() is None:
            # A job runs once: when it starts again, its earlier start on another machine has ended.
            progress.status = RunStatus.KILLED
        else:
            process = progress.process
            who, fix = f"process {process.pid} on {process.host}", "choose another --out"
            if progress.process == ProcessIdentity.of_this_process():
                who, fix = "this process", "stop the watch that writes it first, or choose another directory"
            msg = f"{path}: is still being written by {who} (attempt {entry.index}); {fix}"
            raise RunExistsError(msg)
    if not manifest.attempts or any(_is_restart(new, entry) for entry in manifest.attempts):
        return manifest
    newest = manifest.attempts[-1]
    script = Path(newest.script).name
    if script and new.script and script != Path(new.script).name:
        raise RunExistsError(
            f"{path}: holds another training run (of {script}, this script is {Path(new.script).name}); "
            "choose another --out"
        )
    if not resume:
        what = f"a run of {script}" if script else "a run"
        raise RunHeldError(
            f"{path}: holds {what} already ({newest.progress.status_now().value}); choose another --out"
        )
    return manifest


def _is_restart(new: AttemptEntry, entry: AttemptEntry) -> bool:
    """Return whether the job of ``entry`` starts again as ``own``.

    torchrun keeps the number of the restart when only the number of its ranks changes. For a single process
    an equal number is another command of the same job.
    """
    several = max(new.world_size, entry.world_size) > 1
    return job_of(new.launch) == job_of(entry.launch) and (several or new.launch != entry.launch)


def _expected_fingerprint(
    path: Path, attempts: list[AttemptEntry], new: AttemptEntry, rank: int
) -> Fingerprint | None:
    """Return the fingerprint that ``rank`` must have to go on with a run; None if it restarts its job."""
    if not attempts or any(_is_restart(new, entry) for entry in attempts):
        return None
    document = path / attempt_folder(attempts[-1].index) / document_name(rank)
    try:
        stored = read_document(document).get("fingerprint")
        return None if stored is None else codec.convert(stored, Fingerprint)
    except (RunFormatError, OSError, ValueError):
        return None


def _is_leftover(child: Path) -> bool:
    """Return whether a kill between the first two moments of a run left this behind."""
    if atomic_files.is_temporary(child.name) or child.name == CLAIM:
        return True
    return child.name == attempt_folder(0) and child.is_dir() and not any(child.iterdir())


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        with contextlib.suppress(OSError):  # another process has put something there meanwhile
            folder.rmdir()


_POLL_INTERVAL_S = 0.05


def wait_for_ranks(path: str | Path, timeout_s: float) -> bool:
    """Wait until the ranks above 0 of the newest attempt have ended; return whether all have."""
    deadline = time.monotonic() + timeout_s
    while not _have_ended(Path(path)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def _have_ended(path: Path) -> bool:
    try:
        attempt = read_manifest(path).attempts[-1]
        for rank in range(1, attempt.world_size):
            document = path / attempt_folder(attempt.index) / document_name(rank)
            if not document.exists():
                continue
            progress = read_document(document).get("progress") or {}
            if codec.convert(progress, Progress).status_now() is RunStatus.RUNNING:
                return False
    except (OSError, ValueError, IndexError, RunFormatError):
        return False
    return True
