"""How a process enters a run folder: as a new run, a new attempt of one, or a further rank."""

from __future__ import annotations

import shutil
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from backlight.records import RunStatus
from backlight.store.errors import RunExistsError, RunFormatError, StoreError
from backlight.store.manifest import MANIFEST, AttemptEntry, Manifest, attempt_folder, read_manifest
from backlight.store.process import ProcessIdentity

JOIN_TIMEOUT = 60.0
"""Seconds that a further rank waits for rank 0 to open the attempt."""


@dataclass(slots=True)
class Entry:
    """What a writer needs to know of its place; ``made`` is removed again if opening fails."""

    manifest: Manifest
    attempt: AttemptEntry
    folder: Path
    made: list[Path] = field(default_factory=list)

    def undo(self) -> None:
        """Remove what entering the folder created."""
        for path in reversed(self.made):
            shutil.rmtree(path, ignore_errors=True)


def database_name(rank: int) -> str:
    """Return the name of the database of a rank."""
    return f"rank-{rank:05d}.db"


def document_name(rank: int) -> str:
    """Return the name of the document of a rank."""
    return f"rank-{rank:05d}.json"


def enter_as_first(
    path: Path,
    *,
    name: str,
    launch: str | None,
    world_size: int,
    script: str,
    arguments: tuple[str, ...],
    rooms: tuple[str, ...],
    groups: dict[str, str],
    overrides: dict[str, dict[str, float]],
    flush_interval: float,
    step_offset: int | None,
) -> Entry:
    """Open a new attempt as rank 0; nothing is left behind where that fails.

    Raises
    ------
    RunExistsError
        If the folder holds something else, or a living process still writes the run.
    RunFormatError
        If the folder is a run that this release cannot read.
    OSError
        If the file system does not let us.
    """
    made: list[Path] = []
    manifest = _existing(path)
    if manifest is None:
        manifest = Manifest.new(name, launch)
        if not path.exists():
            path.mkdir(parents=True)
            made.append(path)
    index = max((entry.index for entry in manifest.attempts), default=-1) + 1
    offset = _next_step(path) if step_offset is None and manifest.attempts else step_offset or 0
    now = time.time()
    attempt = AttemptEntry(
        index=index,
        step_offset=offset,
        status=RunStatus.RUNNING,
        started=now,
        updated=now,
        ended=None,
        world_size=world_size,
        launch=launch or uuid.uuid4().hex,
        script=script,
        argv=arguments,
        rooms=rooms,
        flush_interval=flush_interval,
        process=ProcessIdentity.of_this_process(),
    )
    for earlier in manifest.attempts:
        if earlier.status is RunStatus.RUNNING:
            earlier.status = RunStatus.KILLED
    manifest.attempts.append(attempt)
    manifest.groups.update(groups)
    manifest.overrides.update(overrides)
    entry = Entry(manifest, attempt, path / attempt_folder(index), made)
    try:
        # The one step that two processes cannot both do.
        entry.folder.mkdir()
    except FileExistsError as error:
        entry.undo()
        msg = f"{path}: another process has just opened attempt {index} of this run; choose another --out"
        raise RunExistsError(msg) from error
    except BaseException:
        entry.undo()
        raise
    made.append(entry.folder)
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
        try:
            manifest = read_manifest(path)
        except RunFormatError:
            manifest = None
        if manifest is not None and manifest.attempts:
            attempt = manifest.attempts[-1]
            folder = path / attempt_folder(attempt.index)
            ours = attempt.launch == launch and attempt.status_now() is RunStatus.RUNNING
            if ours and not (folder / database_name(rank)).exists():
                return Entry(manifest, attempt, folder)
        if time.monotonic() > deadline:
            msg = (
                f"{path}: rank {rank} found no running attempt of launch {launch!r} within {timeout:g} s;"
                " rank 0 opens it: start rank 0 with the same run_id and the same folder"
            )
            raise RunExistsError(msg)
        time.sleep(0.02)


def _existing(path: Path) -> Manifest | None:
    """Return the manifest of the run at ``path``, or None where a new run may begin."""
    if not path.exists():
        return None
    if not path.is_dir():
        raise RunExistsError(f"{path}: is a file, expected a folder; choose another --out")
    if not (path / MANIFEST).exists():
        if any(path.iterdir()):
            raise RunExistsError(f"{path}: is not a backlight run and not empty; choose another --out")
        return None
    manifest = read_manifest(path)
    for entry in manifest.attempts:
        if entry.status_now() is RunStatus.RUNNING:
            who = f"process {entry.process.pid} on {entry.process.host}"
            msg = f"{path}: is still being written by {who} (attempt {entry.index}); choose another --out"
            raise RunExistsError(msg)
    return manifest


def _next_step(path: Path) -> int:
    """Return the global step after the last one that any attempt recorded."""
    from backlight.store.reader import open_run  # noqa: PLC0415 - the reader is only needed to go on

    try:
        return open_run(path).last_step() + 1
    except StoreError:
        return 0
