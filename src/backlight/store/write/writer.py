"""Writer of a run directory: buffered, thread-safe, one per process and rank.

Calls on the path of a step only copy into buffers; :meth:`RunWriter.flush`, called by the writer thread,
writes them as one transaction. What fails, of rows, arrays or documents, is written again with the next. A
disk that is full, or goes on to fail, stops the recording, not the training run: the writer keeps the reason
in ``lost``, passes it once to ``on_lost``, drops what follows and raises nothing.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from backlight import clock, codec
from backlight.interrupts import is_interrupt, suppressed
from backlight.records import Finding, Fingerprint, ParameterRecord, RunStatus
from backlight.redaction import Redaction
from backlight.series import SERIES
from backlight.store import filesystem
from backlight.store.errors import RunWriteError
from backlight.store.format.arrays import ArrayWriter, Filters, write_evidence
from backlight.store.format.manifest import HEARTBEAT_S, AttemptEntry, ListedSummary, Manifest, Progress
from backlight.store.format.names import ARRAYS, database_name, storable
from backlight.store.format.schema import DISK_LIMIT, EVALUATED, NOT_STORED, REPEATED_WRITES, is_loss
from backlight.store.write import database
from backlight.store.write.attempt import Entry, enter
from backlight.store.write.database import Batch, DiskBudget, RankDatabase, SegmentedDatabase

_WIDTHS = {name: (len(schema.floats), len(schema.integers)) for name, schema in SERIES.items()}

MAX_BUFFERED_BYTES = 256 * 1024 * 1024
"""May wait for a flush; rows that come while a stuck disk holds more are counted and dropped."""

RECENT_TABLES = 16
"""Parameter tables that are recognised without comparing their records."""


class RunWriter:
    """Writes one rank of an attempt; create one with :meth:`create`.

    ``progress`` is that of this rank, also where it could not be published; ``lost`` is the reason why
    recording stopped, or None; ``part_reason`` why this rank writes a part of the run in another folder than
    it was given, or empty; ``expected_fingerprint`` what the model of a resumed run must have, if anything.
    """

    def __init__(
        self,
        entry: Entry,
        *,
        max_disk: int | None,
        on_lost: Callable[[str], None] | None,
        on_limit: Callable[[str], None] | None,
        filters: Filters,
        options: Mapping[str, Any] | None,
        part_reason: str,
    ) -> None:
        self.part_reason = part_reason
        self.expected_fingerprint = entry.earlier
        self.path = entry.path = entry.path.absolute()  # the script may change the directory
        self.run_id = entry.manifest.run_id
        self.attempt = entry.attempt.index
        self.step_offset = entry.attempt.step_offset
        self.rank = rank = entry.rank
        self.lost: str | None = None
        self._on_lost = on_lost or (lambda _: None)
        self._on_limit = on_limit or (lambda _: None)
        self._pid = os.getpid()
        self._buffers = threading.Lock()
        self._disk = threading.RLock()
        self._closed = False
        self._batch = Batch()
        self._dropped: dict[str, int] = {}
        self._failures = self._evidence_bytes = 0
        self._failure = ""
        self._tables: dict[tuple[ParameterRecord, ...], int] = {}
        self._recent: dict[int, tuple[tuple[ParameterRecord, ...], int]] = {}  # by id of the records
        self._sizes: dict[int, npt.NDArray[np.int64]] = {}
        self._names: dict[tuple[str, str], int] = {}
        self._loss_names: dict[int, str] = {}
        # What a list of runs shows of the rows that were written.
        self._losses: dict[str, float] = {}
        self._findings: list[Finding] = []
        self._evaluated: dict[str, Any] | None = None
        self._entry, self.progress = entry, entry.progress
        entry.options = dict(options or {})
        entry.interval_s = entry.attempt.flush_interval * 0.9
        share = entry.attempt.world_size
        self._before = filesystem.folder_size(self.path) // share if max_disk is not None else 0
        self._budget = DiskBudget(None if max_disk is None else max_disk // share)
        self._arrays = ArrayWriter(entry.folder / ARRAYS, rank, filters)
        meta = dict(
            run_id=self.run_id, rank=f"{rank}", attempt=f"{self.attempt}", launch=entry.attempt.launch
        )
        self._db: RankDatabase | SegmentedDatabase
        if filesystem.on_network(entry.folder):
            self._db = SegmentedDatabase(entry.folder, rank, meta)
            self._entry.progress.local = str(self._db.local)
            # A flush is not readable before its segment, and a thousand ranks share one metadata server.
            self._entry.interval_s = HEARTBEAT_S
        else:
            self._db = RankDatabase(entry.folder / database_name(rank), meta, self._budget.log_pages())

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        name: str = "",
        rank: int = 0,
        world_size: int = 1,
        run_id: str | None = None,
        launch: str | None = None,
        resume: bool = False,
        numbered: bool = False,
        otherwise: Path | None = None,
        script: str = "",
        arguments: Sequence[str] = (),
        max_disk: int | None = None,
        overrides: Mapping[str, Mapping[str, float]] | None = None,
        groups: Mapping[str, str] | None = None,
        monitors: Sequence[str] = (),
        flush_interval: float = 1.0,
        step_offset: int | None = None,
        on_lost: Callable[[str], None] | None = None,
        on_limit: Callable[[str], None] | None = None,
        filters: Filters = Filters(),  # noqa: B008 - frozen
        options: Mapping[str, Any] | None = None,
        join_timeout: float | None = None,
        share: bool = False,
        redact: Sequence[str] = (),
        keep_arguments: bool = False,
    ) -> RunWriter:
        """Open a new run; a restart of its job (by ``launch``), or ``resume``, opens an attempt of one.

        Parameters
        ----------
        run_id:
            What all ranks share; None for a single process.
        launch:
            Id of this start among the restarts of its job; None for ``run_id``.
        resume:
            Whether to continue a run that is at ``path``.
        numbered:
            Whether ``path`` is to be a new directory, with a number where another process has created it.
        otherwise:
            Directory for all ranks where ``path`` cannot take this run; that of a single process is numbered.
        share:
            Whether a directory that is created is open to other users, as far as the umask permits.
        redact:
            Patterns of secrets in arguments, besides those of :mod:`backlight.redaction`.
        keep_arguments:
            Whether arguments are stored as they are.

        Raises
        ------
        RunExistsError
            If the directory cannot take this run.
        RunWriteError
            If the file system refuses.
        ValueError
            If an argument is out of range.
        """
        if not 0 <= rank < world_size or flush_interval < 0 or (max_disk is not None and max_disk <= 0):
            msg = f"got rank {rank} of {world_size}, flush_interval {flush_interval}, max_disk {max_disk}"
            raise ValueError(f"{msg}; expected 0 <= rank < world_size, an interval >= 0, a limit > 0 or None")
        redaction = Redaction(tuple(redact), keep_arguments)
        progress, run = Progress.begin(), run_id or uuid.uuid4().hex
        attempt = AttemptEntry(
            index=0,
            step_offset=0,
            started=progress.updated,
            world_size=world_size,
            launch=launch or run,
            script=storable(script),
            argv=tuple(storable(a) for a in redaction.arguments(arguments)),
            monitors=tuple(monitors),
            flush_interval=flush_interval,
            progress=progress,
            first=rank,
        )
        manifest = Manifest(
            run_id=run,
            name=storable(name),
            created=clock.unix_time(),
            groups=dict(groups or {}),
            overrides={monitor: dict(fields) for monitor, fields in (overrides or {}).items()},
            attempts=[attempt],
        )
        entry, part_reason = enter(
            Path(path), manifest, step_offset, launch=run_id, join_timeout=join_timeout,
            otherwise=otherwise, resume=resume, numbered=numbered, share=share,
        )  # fmt: skip
        entry.redaction = redaction
        writer = None
        try:
            writer = cls(
                entry, max_disk=max_disk, on_lost=on_lost, on_limit=on_limit, filters=filters,
                options=options, part_reason=part_reason,
            )  # fmt: skip
            writer._entry.publish_document()
            if writer._entry.is_first:
                writer._entry.publish()
        except Exception as error:
            entry.undo() if writer is None else writer.discard()
            if is_interrupt(error):
                raise
            raise RunWriteError(f"{path}: cannot be written: {error}; choose another --out") from error
        return writer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the run; after an error discard it."""
        self.close() if error is None else self.discard()

    def fingerprint(self, fingerprint: Fingerprint) -> None:
        """Store the fingerprint of this rank, replacing an earlier one."""
        if self._off():
            return
        with self._disk:
            self._try(lambda: self._entry.set_fingerprint(fingerprint))

    def parameter_table(self, parameters: tuple[ParameterRecord, ...]) -> int:
        """Return the id of a table of parameters; an equal table has the same id."""
        if self._pid != os.getpid():
            return 0
        with self._buffers:
            # Hashing hundreds of records at every step would cost more than the rest of it.
            recent, table = self._recent.get(id(parameters), (None, 0))
            if recent is parameters:
                return table
            if len(self._recent) >= RECENT_TABLES:
                self._recent.clear()
            table = self._tables.get(parameters, 0)
            if not table:
                names = [p.name for p in parameters]
                if len(set(names)) != len(names):
                    twice = next(n for n in names if names.count(n) > 1)
                    raise ValueError(f"the parameter table names {twice!r} twice; every row needs its own")
                table = self._tables[parameters] = len(self._tables) + 1
                self._sizes[table] = np.array([p.numel for p in parameters], dtype=np.int64)
                self._batch.tables.append((table, codec.encode_row(parameters)))
            self._recent[id(parameters)] = (parameters, table)
            return table

    def append(
        self,
        series: str,
        step: int,
        table: int,
        floats_PF: npt.ArrayLike,
        ints_PI: npt.ArrayLike,
        part: int = 0,
    ) -> None:
        """Buffer one recorded step of a per-parameter series; the arrays are copied."""
        if self._off():
            return
        P, (F, K) = len(self._sizes[table]), _WIDTHS[series]
        floats = np.array(floats_PF, dtype=np.float64)
        ints = np.array(ints_PI, dtype=np.int64)
        if floats.shape != (P, F) or ints.shape != (P, K):
            msg = f"series {series!r}: got floats {floats.shape} and integers {ints.shape}"
            raise ValueError(f"{msg}, expected {(P, F)} and {(P, K)} for parameter table {table}")
        with self._buffers:
            is_kept = self._budget.keeps(step, pending=self._batch.bytes)
            if is_kept and self._fits(series, floats.nbytes + ints.nbytes):
                self._batch.series[series].append((part, int(step), table, floats, ints))

    def scalar(self, step: int, name: str, value: float, source: str = "backlight") -> None:
        """Buffer one scalar; ``source`` is ``"backlight"`` or ``"user"``."""
        self.scalars(step, {name: value}, source)

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        """Buffer several scalars of one step."""
        if self._off():
            return
        with self._buffers:
            if not self._budget.keeps(step, source, self._batch.bytes):
                return
            for name, value in values.items():
                if (identifier := self._names.get((source, name))) is None:
                    identifier = self._names[source, name] = len(self._names) + 1
                    self._batch.names.append((identifier, storable(source), storable(name)))
                if self._fits("scalar", database.SCALAR_BYTES):
                    self._batch.scalars.append((identifier, int(step), float(value)))

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Buffer one event; ``payload`` becomes JSON."""
        if self._off():
            return
        text = codec.encode_row(payload)
        with self._buffers:
            if self._fits("event", len(text)):
                if kind == EVALUATED:
                    self._evaluated = dict(payload)
                self._batch.events.append((step, clock.unix_time(), storable(kind), text))

    def finding(self, finding: Finding) -> None:
        """Store a finding at once."""
        if self._off():
            return
        with self._buffers:
            self._batch.findings.append((clock.unix_time(), codec.encode_row(finding)))
            self._findings.append(finding)
        self.flush()

    def array(
        self,
        name: str,
        step: int,
        values: npt.ArrayLike,
        *,
        dims: Sequence[str] = (),
        unit: str = "1",
        encoding: str = "plain",
    ) -> None:
        """Buffer one array; ``dims`` names its axes, ``encoding="bf16"`` takes bfloat16 bits as uint16."""
        if self._off():
            return
        with self._disk:
            size = np.asarray(values).nbytes
            if not self._budget.fits(self._arrays.pending_bytes + size):
                with self._buffers:
                    self._drop(f"array {name}")
                return
            self._arrays.add(storable(name), step, values, dims, storable(unit), encoding)
            full = self._arrays.pending_bytes > MAX_BUFFERED_BYTES
        if full:
            self.flush()

    def evidence(self, name: str, data: bytes | str) -> str:
        """Store a file that findings cite; return its path below the run directory, empty if lost."""
        if self._off():
            return ""
        with self._disk:
            try:
                path = write_evidence(self._entry.folder, name, data)
                self._evidence_bytes += path.stat().st_size
                return path.relative_to(self.path).as_posix()
            except OSError as error:
                with self._buffers:
                    self._drop(f"evidence {storable(name)}")
                if database.is_permanent(error):
                    self._lose(f"{self.path}: {database.reason_of(error, self._db)}")
        return ""

    def reach(self, step: int) -> None:
        """Note the last step that was taken, recorded or not; published with the next flush."""
        if self._pid == os.getpid() and not self._closed and step > self._entry.progress.step:
            with self._disk:
                self._entry.update(self._entry.progress.files, step)

    def flush(self) -> None:
        """Write the buffers as one transaction, and publish the progress."""
        if self._off():
            return
        with self._disk:
            with self._buffers:
                if self._off():
                    return
                batch, self._batch = self._batch, Batch()
                dropped, self._dropped = self._dropped, {}
            if dropped:
                what = {"rows": dropped, "reason": "slow or failing disk, or max_disk reached"}
                batch.events.append((None, clock.unix_time(), NOT_STORED, codec.encode_row(what)))
            self._try(lambda: self._write(batch))

    def flush_all(self) -> None:
        """Flush, and try again what the disk refused, until it is written or counts as lost."""
        self.flush()
        while (self._failures or self._batch) and not self._off():
            self.flush()

    def _write(self, batch: Batch) -> None:
        """Write what waits; rows that fail wait for the next flush, which uses a new connection."""
        try:
            if self._failures:
                self._db.reopen()
            if batch:
                self._db.write(batch, self._sizes)
                names = self._loss_names
                names |= {i: name for i, source, name in batch.names if is_loss(name, source)}
                self._losses |= {names[i]: value for i, _, value in batch.scalars if i in names}
            else:
                self._db.check_exists()
        except Exception as error:
            if not isinstance(error, database.UnpublishedError):
                with self._buffers:
                    self._batch = batch.followed_by(self._batch)
            raise
        wrote_arrays = self._arrays.flush()
        if batch or wrote_arrays:
            self._entry.update(self._last_rows(), batch.last_step())
        self.progress.stored = self.progress.step
        self._entry.publish_if_due()
        self._watch_size()
        if self._failures:
            repeated = {"writes": self._failures, "reason": self._failure}
            self.event(max(self._entry.progress.step, 0), REPEATED_WRITES, repeated)
        self._failures = 0

    def close(self, status: RunStatus = RunStatus.FINISHED) -> None:
        """Flush, publish how the attempt ended, and close the files; further calls do nothing."""
        if self._pid != os.getpid():
            return
        self.flush_all()
        with self._disk:
            if self._closed:
                return
            self._closed = True
            self._try(self._finish_arrays, again=True)
            self._try(self._close_database)
            summary = ListedSummary.of(self._findings, self._evaluated, self._losses)
            self._try(lambda: self._entry.end(status, summary), again=True)

    def _finish_arrays(self) -> None:
        if self._arrays.begin_finish():
            # First stated, then compressed: a smaller file than stated would read as a loss.
            self._entry.update(self._last_rows())
            self._entry.publish()
            self._arrays.finish()

    def _close_database(self) -> None:
        self._db.close()
        if self.lost is None:
            self._entry.progress.local = ""
            self._entry.update(self._last_rows())

    def discard(self) -> None:
        """Remove this attempt unless it is closed; a run from before is as it was. Raises nothing."""
        if self._pid != os.getpid():
            return
        with self._disk:
            if self._closed:
                return
            self._closed = True
            with suppressed():
                self._db.close()
            self._entry.undo()

    def _off(self) -> bool:
        return self._closed or self.lost is not None or self._pid != os.getpid()

    def _fits(self, what: str, size: int) -> bool:
        if self._batch.bytes + size > MAX_BUFFERED_BYTES:
            self._drop(what)
            return False
        self._batch.bytes += size
        return True

    def _drop(self, what: str) -> None:
        self._dropped[what] = self._dropped.get(what, 0) + 1

    def _last_rows(self) -> dict[str, dict[str, int]]:
        arrays = {f"{ARRAYS}/{name}": size for name, size in self._arrays.files().items()}
        return {f"{self._entry.folder.name}/{n}": last for n, last in (self._db.published | arrays).items()}

    def _watch_size(self) -> None:
        used = self._before + self._db.size() + self._arrays.size() + self._evidence_bytes
        is_first = self._budget.stride == 1
        if not self._budget.update(used):
            return
        stride, limit = self._budget.stride, self._budget.limit
        what = f"every {stride}th recorded step" if stride else "nothing more"
        payload = {"bytes": used, "limit": limit, "stride": stride, "keeps": what}
        self.event(max(self._entry.progress.step, 0), DISK_LIMIT, payload)
        if is_first:
            with suppressed():
                self._on_limit(f"{self.path}: {used} of {limit} bytes used; {what} is stored")

    def _try(self, write: Callable[[], None], *, again: bool = False) -> None:
        """Call ``write``; turn an error of the disk that is permanent, or goes on, into a loss."""
        try:
            write()
        except Exception as error:
            if is_interrupt(error):
                raise
            self._failures += 1
            self._failure = database.reason_of(error, self._db)
            if self._failures > database.MAX_FAILURES or database.is_permanent(error):
                self._lose(f"{self.path}: {database.reason_of(error, self._db)}")
            if again and self.lost is None:
                self._try(write, again=True)

    def _lose(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = self._entry.progress.lost = reason
        with self._buffers:
            self._batch = Batch()
        with suppressed():
            self._entry.publish()
        with suppressed():
            self._on_lost(reason)
