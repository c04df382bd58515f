"""``manifest.json``: what a run folder says of itself. Written by rank 0 alone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from backlight.records import RunStatus
from backlight.store import documents
from backlight.store.errors import RunFormatError
from backlight.store.process import ProcessIdentity
from backlight.store.schema import FORMAT_VERSION, OLDEST_READABLE

MANIFEST = "manifest.json"
FORMAT_NAME = "backlight run"

HEARTBEAT = 60.0
"""Seconds after which a writer on another host, silent since, is no longer called running."""


@dataclass(slots=True)
class AttemptEntry:
    """One attempt as the manifest holds it; ``files`` gives the last rows known of each file."""

    index: int
    step_offset: int
    status: RunStatus
    started: float
    updated: float
    ended: float | None
    world_size: int
    launch: str
    script: str
    argv: tuple[str, ...]
    rooms: tuple[str, ...]
    flush_interval: float
    process: ProcessIdentity
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    lost: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :func:`backlight.records.to_json` wrote."""
        ended = data.get("ended")
        return cls(
            index=int(data["index"]),
            step_offset=int(data["step_offset"]),
            status=RunStatus(data.get("status", RunStatus.UNKNOWN)),
            started=float(data.get("started", 0.0)),
            updated=float(data.get("updated", 0.0)),
            ended=None if ended is None else float(ended),
            world_size=int(data.get("world_size", 1)),
            launch=str(data.get("launch", "")),
            script=str(data.get("script", "")),
            argv=tuple(str(a) for a in data.get("argv", ())),
            rooms=tuple(str(r) for r in data.get("rooms", ())),
            flush_interval=float(data.get("flush_interval", 1.0)),
            process=ProcessIdentity.from_json(data.get("process", {})),
            files={
                str(name): {str(key): int(value) for key, value in last.items()}
                for name, last in data.get("files", {}).items()
            },
            lost=str(data.get("lost", "")),
        )

    def status_now(self, now: float | None = None) -> RunStatus:
        """Return the status as far as it can be told from here, by the life of the writer."""
        if self.status is not RunStatus.RUNNING:
            return self.status
        alive = self.process.alive()
        if alive is None:
            fresh = (time.time() if now is None else now) - self.updated < HEARTBEAT
            return RunStatus.RUNNING if fresh else RunStatus.UNKNOWN
        return RunStatus.RUNNING if alive else RunStatus.KILLED


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

    def write(self, folder: Path, *, sync: bool = True) -> None:
        """Put the manifest into ``folder`` in one step.

        Raises
        ------
        OSError
            If the file system does not let us.
        """
        text = documents.dump({"kind": FORMAT_NAME, **_fields(self)})
        documents.write_atomically(folder / MANIFEST, text.encode("ascii"), sync=sync)


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
    if not folder.exists():
        raise RunFormatError(f"{folder}: there is no such folder; expected the folder of a backlight run")
    if not path.is_file():
        msg = f"{folder}: is not a backlight run (it has no {MANIFEST}); give the folder that --out named"
        raise RunFormatError(msg)
    data = documents.read_document(path)
    if data.get("kind") != FORMAT_NAME:
        msg = f"{path}: says kind {data.get('kind')!r}, expected {FORMAT_NAME!r}; this is another program's file"
        raise RunFormatError(msg)
    check_format(path, data.get("format"))
    try:
        return Manifest(
            run_id=str(data["run_id"]),
            name=str(data.get("name", "")),
            format=int(data["format"]),
            created=float(data.get("created", 0.0)),
            groups={str(k): str(v) for k, v in data.get("groups", {}).items()},
            overrides={
                str(room): {str(k): float(v) for k, v in fields.items()}
                for room, fields in data.get("overrides", {}).items()
            },
            attempts=[AttemptEntry.from_json(entry) for entry in data.get("attempts", ())],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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
            " Open it with an older release"
        )
        raise RunFormatError(msg)


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "name": manifest.name,
        "format": manifest.format,
        "created": manifest.created,
        "groups": manifest.groups,
        "overrides": manifest.overrides,
        "attempts": list(manifest.attempts),
    }
