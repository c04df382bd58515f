"""``manifest.json``: what a run directory says of itself. Written by rank 0 alone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from backlight.records import RunStatus, to_json
from backlight.store.errors import RunFormatError
from backlight.store.format import migrations
from backlight.store.format.schema import FORMAT_VERSION, OLDEST_READABLE
from backlight.store.platform import atomic_json
from backlight.store.platform.process import ProcessIdentity

MANIFEST = "manifest.json"
FORMAT_NAME = "backlight run"

HEARTBEAT = 15.0
"""Seconds after which a writer says that it lives, also when nothing is recorded."""

SILENCE = 60.0
"""Seconds of silence after which a writer on another host is no longer called running."""


LARGEST_INDEX = 1_000_000
"""Attempts of a run, beyond any real one."""


@dataclass(slots=True)
class Progress:
    """How far one rank of an attempt got, as it says itself at each flush.

    ``files`` gives, by path below the run directory, the highest row of each table of a database or the
    size of another file, so that a later loss is stated and not guessed. ``step`` is the last
    attempt-local step. ``local`` is the folder on ``process.host`` with what is not yet published from
    there, empty where everything is written into the run directory directly.
    """

    status: RunStatus
    process: ProcessIdentity
    updated: float
    ended: float | None = None
    step: int = -1
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    lost: str = ""
    local: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :func:`backlight.records.to_json` wrote."""
        ended = data.get("ended")
        return cls(
            status=RunStatus(data.get("status", RunStatus.UNKNOWN)),
            process=ProcessIdentity.from_json(data.get("process", {})),
            updated=float(data.get("updated", 0.0)),
            ended=None if ended is None else float(ended),
            step=int(data.get("step", -1)),
            files={
                str(name): {str(key): int(value) for key, value in last.items()}
                for name, last in data.get("files", {}).items()
            },
            lost=str(data.get("lost", "")),
            local=str(data.get("local", "")),
        )

    def status_now(self, now: float | None = None) -> RunStatus:
        """Return the status as far as it can be told from here, by the life of the writer."""
        if self.status is not RunStatus.RUNNING:
            return self.status
        alive = self.process.alive()
        if alive is None:
            fresh = (time.time() if now is None else now) - self.updated < SILENCE
            return RunStatus.RUNNING if fresh else RunStatus.UNKNOWN
        return RunStatus.RUNNING if alive else RunStatus.KILLED


@dataclass(slots=True)
class AttemptEntry:
    """One attempt as the manifest holds it; ``progress`` is that of the rank ``first``.

    That is rank 0, but in the part of a run that a host keeps because it does not see the folder of rank 0.
    """

    index: int
    step_offset: int
    started: float
    world_size: int
    launch: str
    script: str
    argv: tuple[str, ...]
    monitors: tuple[str, ...]
    flush_interval: float
    progress: Progress
    first: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :func:`backlight.records.to_json` wrote.

        Raises
        ------
        ValueError
            If a number is out of any sensible range.
        """
        index, offset = int(data["index"]), int(data["step_offset"])
        if not 0 <= index < LARGEST_INDEX or abs(offset) >= 2**62:
            raise ValueError(f"attempt {index} with step offset {offset}")
        return cls(
            index=index,
            step_offset=offset,
            started=float(data.get("started", 0.0)),
            world_size=int(data.get("world_size", 1)),
            launch=str(data.get("launch", "")),
            script=str(data.get("script", "")),
            argv=tuple(str(a) for a in data.get("argv", ())),
            monitors=tuple(str(r) for r in data.get("monitors", ())),
            flush_interval=float(data.get("flush_interval", 1.0)),
            progress=Progress.from_json(data.get("progress", {})),
            first=int(data.get("first", 0)),
        )


@dataclass(slots=True)
class Manifest:
    """The whole of ``manifest.json``."""

    run_id: str
    name: str
    format: int = FORMAT_VERSION
    created: float = 0.0
    groups: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, dict[str, float]] = field(default_factory=dict)
    attempts: list[AttemptEntry] = field(default_factory=list)

    @classmethod
    def new(cls, name: str, run_id: str | None) -> Self:
        """Return the manifest of a run that begins now."""
        return cls(run_id=run_id or uuid.uuid4().hex, name=name, created=time.time())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`write` wrote; unknown keys are ignored.

        Raises
        ------
        ValueError
            If two attempts have one number.
        """
        attempts = [AttemptEntry.from_json(entry) for entry in data.get("attempts", ())]
        if len({entry.index for entry in attempts}) != len(attempts):
            raise ValueError("two attempts have one number")
        return cls(
            run_id=str(data["run_id"]),
            name=str(data.get("name", "")),
            format=int(data["format"]),
            created=float(data.get("created", 0.0)),
            groups={str(k): str(v) for k, v in data.get("groups", {}).items()},
            overrides={
                str(monitor): {str(k): float(v) for k, v in fields.items()}
                for monitor, fields in data.get("overrides", {}).items()
            },
            attempts=attempts,
        )

    def write(self, folder: Path) -> None:
        """Put the manifest into ``folder`` in one step; an OSError passes through."""
        text = atomic_json.dump({"kind": FORMAT_NAME, **to_json(self)})
        atomic_json.write_atomically(folder / MANIFEST, text.encode("ascii"))


def attempt_folder(index: int) -> str:
    """Return the name of the folder of an attempt."""
    return f"attempt-{index:03d}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``.

    Raises
    ------
    RunFormatError
        If the folder is no run, its manifest is damaged, or its format is one that this release cannot read.
    """
    path = folder / MANIFEST
    try:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "there is no such folder"
            raise RunFormatError(f"{folder}: {what}; expected the folder of a backlight run")
        if not path.is_file():
            what = f"it has no {MANIFEST}" if any(folder.iterdir()) else "it is empty: no run began in it"
            msg = f"{folder}: is not a backlight run ({what}); give the folder that --out named"
            raise RunFormatError(msg)
    except OSError as error:
        raise RunFormatError(f"{folder}: cannot be read: {error.strerror or error}") from error
    data = atomic_json.read_document(path)
    if data.get("kind") != FORMAT_NAME:
        msg = f"{path}: says kind {data.get('kind')!r}, expected {FORMAT_NAME!r}; another program wrote it"
        raise RunFormatError(msg)
    check_format(path, data.get("format"))
    try:
        return Manifest.from_json(migrations.migrate_manifest(data))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        msg = f"{path}: is damaged: {type(error).__name__}: {error}; restore it from a copy of the run"
        raise RunFormatError(msg) from error


def check_format(path: Path, found: object) -> None:
    """Refuse a format that this release cannot read.

    Raises
    ------
    RunFormatError
        With both versions and the way out.
    """
    if not isinstance(found, int) or isinstance(found, bool):
        raise RunFormatError(f"{path}: says format {found!r}, expected a number; it is damaged or foreign")
    if found > FORMAT_VERSION:
        msg = (
            f"{path}: format {found}, this release of backlight reads {OLDEST_READABLE} to {FORMAT_VERSION}."
            " Upgrade backlight to the release that wrote the run, or newer"
        )
        raise RunFormatError(msg)
    if found < OLDEST_READABLE:
        msg = (
            f"{path}: format {found}, this release of backlight reads {OLDEST_READABLE} to {FORMAT_VERSION}."
            " Open it with the release that wrote it, and export what you need"
        )
        raise RunFormatError(msg)
