"""Documents of a run directory, written whole and read with checks; above all ``manifest.json``.

The manifest holds the attempts of a run and how far each got. Rank 0 alone writes it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from backlight import atomic_files, clock, codec, untrusted_files
from backlight.records import Finding, RunStatus, Severity
from backlight.store.errors import RunFormatError
from backlight.store.filesystem import ProcessIdentity
from backlight.store.format.names import (
    MANIFEST,
    WATCHDOG_DATABASE,
    attempt_folder,
    database_name,
    parse_columns,
    parse_database,
)
from backlight.store.format.schema import FORMAT_VERSION

FORMAT_NAME = "backlight run"

HEARTBEAT_S = 15.0
"""Interval in which a writer states its progress, also when nothing is recorded."""

MAX_SILENCE_S = 60.0
"""A writer on another host that stated nothing for longer no longer counts as running."""

MAX_ATTEMPTS = 1_000_000
"""Far beyond any real run: a larger index is damage."""


@dataclass(slots=True)
class Progress:
    """Progress of one rank of an attempt, which it states itself at each flush.

    ``files`` gives, by path below the run directory, the highest row of each table of a database or the size
    of another file, so that a later loss is known and not guessed. ``step`` is the last attempt-local step,
    recorded or not, and ``stored`` the last one up to which everything is in the files. ``local`` is the
    folder on ``process.host`` with what is not yet published from there, empty where everything is written
    into the run directory directly.
    """

    status: RunStatus = RunStatus.UNKNOWN
    process: ProcessIdentity = field(default_factory=ProcessIdentity)
    updated: float = 0.0
    ended: float | None = None
    step: int = -1
    stored: int = -1
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    lost: str = ""
    local: str = ""

    @classmethod
    def begin(cls) -> Self:
        """Return the progress of an attempt that this process begins now."""
        return cls(RunStatus.RUNNING, ProcessIdentity.of_this_process(), updated=clock.unix_time())

    def status_now(self, now: float | None = None) -> RunStatus:
        """Return the status as far as it can be determined from here, by the life of the writer."""
        if self.status is not RunStatus.RUNNING:
            return self.status
        alive = self.process.alive()
        if alive is None:
            fresh = (clock.system_time() if now is None else now) - self.updated < MAX_SILENCE_S
            return RunStatus.RUNNING if fresh else RunStatus.UNKNOWN
        return RunStatus.RUNNING if alive else RunStatus.KILLED


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSummary:
    """What a list of runs shows of the database of a first rank, while that is as it was when it was closed.

    ``size`` are its bytes and ``changed`` the time of its last change, in nanoseconds since the epoch. The
    other fields are those of :class:`~backlight.store.read.run_list.ListedRun`; ``lacks`` is what was missing
    when the rules were evaluated.
    """

    size: int = -1
    changed: int = 0
    loss: float | None = None
    loss_label: str = "loss"
    worst: Severity | None = None
    findings: int = 0
    evaluated: bool = False
    lacks: str = ""

    @classmethod
    def of(
        cls, findings: Iterable[Finding], evaluated: Mapping[str, Any] | None, losses: Mapping[str, float]
    ) -> Self:
        """Return that of the findings, the payload of the last evaluation, and the last losses by scalar."""
        subjects = {
            (f.rule, f.subject.parameter, f.subject.module): f.severity for f in findings if not f.is_hint
        }
        several = sum(name.startswith("loss/") for name in losses)
        label = f"sum of {int(losses['losses'])} losses" if losses.get("losses") else "loss"
        return cls(
            loss=losses.get("loss"),
            loss_label=f"one of {several} losses" if several > 1 else label,
            worst=max(subjects.values(), key=lambda severity: severity.rank, default=None),
            findings=len(subjects),
            evaluated=evaluated is not None,
            lacks=str((evaluated or {}).get("lacks", "")),
        )


@dataclass(slots=True, kw_only=True)
class AttemptEntry:
    """One attempt; ``progress`` is that of the rank ``first``: 0, except in a part of a run.

    ``summary`` is None unless all that a list shows of the attempt is in one database, and that is closed.
    """

    index: int
    step_offset: int
    started: float = 0.0
    world_size: int = 1
    launch: str = ""
    script: str = ""
    argv: tuple[str, ...] = ()
    monitors: tuple[str, ...] = ()
    flush_interval: float = 1.0
    progress: Progress = field(default_factory=Progress)
    first: int = 0
    summary: ListedSummary | None = None

    def database_state(self, run: Path) -> tuple[int, int] | None:
        """Return size and last change of the first rank's database; None where a list needs more files."""
        folder = f"{run}/{attempt_folder(self.index)}"
        database = database_name(self.first)
        for name in os.listdir(folder):  # noqa: PTH208 - names alone, for thousands of runs
            if name != database and (parse_columns(name) is not None or self._is_listed(name)):
                return None
        state = os.stat(f"{folder}/{database}", follow_symlinks=False)  # noqa: PTH116 - as above
        return (state.st_size, state.st_mtime_ns) if stat.S_ISREG(state.st_mode) else None

    def _is_listed(self, name: str) -> bool:
        """Return whether a file may hold what a list shows: of another process, or what SQLite keeps."""
        span = parse_database(re.sub(r"-[a-z]+$", "", name))
        return span[0] <= self.first if span is not None else WATCHDOG_DATABASE.match(name) is not None


@dataclass(slots=True)
class Manifest:
    """The whole of ``manifest.json``."""

    run_id: str
    name: str = ""
    format: int = FORMAT_VERSION
    created: float = 0.0
    groups: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, dict[str, float]] = field(default_factory=dict)
    attempts: list[AttemptEntry] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder`` in one step; an OSError passes through."""
        self.format = FORMAT_VERSION
        write_document(folder / MANIFEST, {"kind": FORMAT_NAME, **codec.plain(self)})


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``."""
    path = folder / MANIFEST
    try:
        if not path.exists():
            if not folder.is_dir():
                what = "is a file" if folder.exists() else "there is no such folder"
                raise RunFormatError(f"{folder}: {what}; expected a run directory")
            what = f"it has no {MANIFEST}" if any(folder.iterdir()) else "it is empty: no run began in it"
            raise RunFormatError(
                f"{folder}: is not a backlight run ({what}); give the folder that --out named"
            )
    except OSError as error:
        raise RunFormatError(f"{folder}: cannot be read: {error.strerror or error}") from error
    data = read_document(path)
    if data.get("kind") != FORMAT_NAME:
        msg = f"{path}: has kind {data.get('kind')!r}, expected {FORMAT_NAME!r}; another program wrote it"
        raise RunFormatError(msg)
    check_format(path, data.get("format"))
    try:
        manifest = codec.convert(data, Manifest)
        if not manifest.attempts:
            raise ValueError("it lists no attempt")
        if len({entry.index for entry in manifest.attempts}) != len(manifest.attempts):
            raise ValueError("two attempts have one number")
        for entry in manifest.attempts:
            if not 0 <= entry.index < MAX_ATTEMPTS or abs(entry.step_offset) >= 2**62:
                raise ValueError(f"attempt {entry.index} with step offset {entry.step_offset}")
    except ValueError as error:
        reason = str(error).removeprefix("Manifest: ")
        raise RunFormatError(f"{path}: is damaged: {reason}; restore it from a copy of the run") from error
    return manifest


def check_format(path: Path, version: object) -> None:
    """Refuse every format but that of this release."""
    if not isinstance(version, int) or isinstance(version, bool):
        raise RunFormatError(f"{path}: has format {version!r}, expected a number; it is damaged or foreign")
    if version != FORMAT_VERSION:
        fix = (
            "Upgrade backlight to the release that wrote the run, or newer"
            if version > FORMAT_VERSION
            else "Open it with the release that wrote it, and export what you need"
        )
        raise RunFormatError(f"{path}: format {version}, this release reads format {FORMAT_VERSION}. {fix}")


_SEAL = re.compile(rb', "crc": (\d{1,10})\}\s*\Z')


def seal(text: str) -> bytes:
    """Return a JSON object, not an empty one, with a last key ``crc``: the CRC-32 of all before it."""
    body = text[:-1].encode("ascii")
    return b'%s, "crc": %d}' % (body, zlib.crc32(body))


class _ChangedError(ValueError):
    """A document is not the one that was written."""


def _unsealed(content: bytes) -> Any:
    """Return what a document holds, less its checksum; a ValueError where that does not fit."""
    document = codec.decode(content.decode("utf-8"))
    if not isinstance(document, dict):
        return document
    stated = document.pop("crc", None)
    seal = _SEAL.search(content)
    if stated is None and seal is None:
        if "format" in document:  # others need none
            raise _ChangedError("it has no checksum")
    elif seal is None or stated != int(seal[1]) or stated != zlib.crc32(content[: seal.start()]):
        raise _ChangedError("its checksum does not match")
    return document


def read_document(path: Path) -> dict[str, Any]:
    """Read a sealed JSON object, without its checksum; RunFormatError where it was changed or is damaged."""
    owners = untrusted_files.owners_beside(path)
    try:
        try:
            document = _unsealed(untrusted_files.read(path, owners=owners))
        except ValueError:  # on a full disk its writer may be overwriting it at this moment
            document = _unsealed(untrusted_files.read(path, owners=owners))
    except OSError as error:
        raise RunFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        msg = f"{path}: is not valid JSON ({error}); it is damaged or was not written by backlight"
        if isinstance(error, _ChangedError):
            msg = f"{path}: {error}: it was changed after it was written; restore it from a copy of the run"
        raise RunFormatError(msg) from error
    if not isinstance(document, dict):
        raise RunFormatError(f"{path}: holds a JSON {type(document).__name__}, expected an object")
    return document


def write_document(path: Path, document: Any) -> None:
    """Replace ``path`` by ``document`` as JSON, sealed.

    On a full disk, where no new file fits, the document takes the place of the old one inside its blocks.

    Raises
    ------
    OSError
        If the file system refuses.
    """
    data = seal(codec.encode(document))
    try:
        atomic_files.write(path, data)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not _overwrite(path, data):
            raise


def _overwrite(path: Path, data: bytes) -> bool:
    """Write ``data`` and spaces over a file if the blocks that it has are enough; return whether they are."""
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            state = os.fstat(file.fileno())
            if len(data) > state.st_blocks * 512:
                return False
            file.write(data.ljust(state.st_size))
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
