"""A stored run, read without torch and without writing into its directory, also live or after a kill."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight import untrusted_files
from backlight.records import Finding, Fingerprint, ParameterRecord, RunStatus
from backlight.registry import DISPLAYS
from backlight.series import SERIES, SeriesSchema
from backlight.store.errors import RunFormatError
from backlight.store.format.arrays import ArrayInfo
from backlight.store.format.manifest import Progress, read_manifest
from backlight.store.format.names import MANIFEST, attempt_folder, storable, written_attempts
from backlight.store.format.row_codec import SOURCES
from backlight.store.format.schema import NOT_STORED, is_optional_scalar, unit_of_scalar
from backlight.store.read import frames
from backlight.store.read.attempt_files import (
    AttemptFiles,
    RankState,
    array_infos,
    array_values,
    evidence_paths,
    last_step,
    open_attempt,
    shortfall,
    states,
)
from backlight.store.read.decode_cache import MAX_READING_BYTES, DecodeCache
from backlight.store.read.frames import Frame, Holders, Spread
from backlight.store.read.rank_file import Block, RankFile, Window, latest
from backlight.store.read.remote import Mirror, is_url, shown
from backlight.store.read.snapshot import sibling, size_of
from backlight.text import did_you_mean

__all__ = [
    "ArrayInfo",
    "Attempt",
    "Event",
    "Frame",
    "RankState",
    "Run",
    "RunFormatError",
    "Scalar",
    "Spread",
    "open_run",
]

MAX_KEPT_ROWS_BYTES = 256 * 1024 * 1024
"""Databases of at most this size keep their encoded rows: rules ask for one column after the other."""

MAX_EVIDENCE_BYTES = 64 * 1024 * 1024
"""Larger evidence is not read."""

MAX_FILES_WITH_SCALARS = 16
"""A run of more files reads one scalar at a time, of all its ranks."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the run; ``ended`` is None where not known, ``ranks`` are the readable ones."""

    index: int
    step_offset: int
    status: RunStatus
    started: float
    ended: float | None
    world_size: int
    argv: tuple[str, ...]
    ranks: tuple[int, ...]
    script: str = ""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar over the global steps at which it was logged."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    unit: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of steps: those taken, those with a loss, and those at which gradients were recorded."""

    taken: int
    with_loss: int
    with_gradients: int


@dataclass(frozen=True, slots=True)
class Event:
    """One event; ``step`` is global, None where it belongs to no step."""

    step: int | None
    time: float
    kind: str
    payload: Mapping[str, Any]
    rank: int
    attempt: int


class Run:
    """A stored run as it was when it was opened; open it again to read later rows.

    Several readings of a growing run share one :class:`DecodeCache`.
    """

    def __init__(
        self, path: Path, cache: DecodeCache | None = None, progress: Progress | None = None
    ) -> None:
        self.path = path
        self.mirror: Mirror | None = None
        self._cache = cache or DecodeCache(MAX_READING_BYTES)
        written = written_attempts(path)  # first: the manifest lists an attempt before its files appear
        self._manifest = read_manifest(path)
        if progress is not None:
            self._manifest.attempts[-1].progress = progress
        self._opened: list[AttemptFiles] = [
            open_attempt(path, entry, self._manifest.run_id) for entry in self._manifest.attempts
        ]
        self._files: list[RankFile] = [file for opened in self._opened for file in opened.files]
        self._watchdogs: list[RankFile] = [file for opened in self._opened for file in opened.watchdogs]
        listed = {attempt_folder(entry.index) for entry in self._manifest.attempts}
        self._lost: dict[str, None] = {
            f"{path / name}: {MANIFEST} lists no such attempt; its data was left out": None
            for name in written
            if name not in listed
        }
        if not self._files and any(opened.unreadable for opened in self._opened):
            reasons = "; ".join(loss for opened in self._opened for loss in opened.losses)
            raise RunFormatError(f"{path}: nothing in this run can be read: {reasons}")
        self.attempts = tuple(_attempt(opened) for opened in self._opened)
        size = sum(size_of(file.path) + size_of(sibling(file.path, "-wal")) for file in self._files)
        self._holders: dict[int, Holders] = {}
        self._owner = self._manifest.run_id, self._manifest.created  # another run may take its path
        for file in self._files:
            file.keeps_rows = size <= MAX_KEPT_ROWS_BYTES
            file.keeps_scalars = cache is not None or len(self._files) <= MAX_FILES_WITH_SCALARS
            # Without a reference to this run: a cycle would delay the removal of temporary copies.
            file.scalar_source = functools.partial(self._cache.scalars, self._owner)

    @property
    def name(self) -> str:
        """Name that the user gave the run."""
        return self._manifest.name

    @property
    def location(self) -> str:
        """Path of the run, or its URL where that is read through a copy."""
        return shown(str(self.path))

    @property
    def run_id(self) -> str:
        """Id that all ranks and attempts share."""
        return self._manifest.run_id

    @property
    def status(self) -> RunStatus:
        """Status of the newest attempt."""
        return self.attempts[-1].status if self.attempts else RunStatus.UNKNOWN

    @property
    def monitors(self) -> tuple[str, ...]:
        """Monitors that watched, over all attempts."""
        return tuple(dict.fromkeys(monitor for a in self._manifest.attempts for monitor in a.monitors))

    @property
    def groups(self) -> Mapping[str, str]:
        """Named groups of parameters with their patterns."""
        return self._manifest.groups

    @property
    def overrides(self) -> Mapping[str, Mapping[str, float]]:
        """Thresholds that the user changed, by monitor."""
        return self._manifest.overrides

    @property
    def losses(self) -> tuple[str, ...]:
        """Messages about lost or unreadable data; empty when the run is whole.

        Damage inside a file is found where it is read, so this may grow as a run is used.
        """
        losses = dict.fromkeys(loss for opened in self._opened for loss in (*opened.endings, *opened.losses))
        for file in self._files:
            for _, _, _, payload in file.events(NOT_STORED):
                losses[f"{file.path}: were not stored ({payload.get('reason')}): {payload.get('rows')}"] = (
                    None
                )
            losses |= file.losses
        for watchdog in self._watchdogs:
            losses |= watchdog.losses
        return tuple(losses | self._lost)

    @property
    def shortfall(self) -> str:
        """What the run lacks of a recording to its end, as ``recording stopped at step 256 of 2,500``.

        Empty where it lacks nothing: without it, no finding means that the rules found none.
        """
        endings = {ending for opened in self._opened for ending in opened.endings}
        return shortfall(
            self._opened,
            lambda kind: [(event.step, event.payload) for event in self.events(kind)],
            is_damaged=not endings.issuperset(self.losses),
        )

    def parameters(self) -> tuple[ParameterRecord, ...]:
        """Return every parameter of any table, in model order, as its newest table describes it.

        ``numel`` is that of the whole, also where ranks hold parts; the record is that of the lowest rank.
        """
        newest: dict[str, ParameterRecord] = {}
        for opened in self._opened:
            of_attempt: dict[str, ParameterRecord] = {}
            for file in opened.files:
                # Parsing the tables of a thousand ranks takes seconds, and most have the same parameters.
                if not all(name in of_attempt for names in file.table_names.values() for name in names):
                    of_attempt = {p.name: p for table in file.tables.values() for p in table} | of_attempt
            newest |= of_attempt
        return tuple(newest[name].unsharded() for name in self._names)

    def ranks(self, attempt: int = -1) -> tuple[RankState, ...]:
        """Return how far each rank of one attempt came, and how it ended (-1: the newest attempt)."""
        chosen = self._opened[-1:] if attempt == -1 else [o for o in self._opened if o.entry.index == attempt]
        return states(chosen[0]) if chosen else ()

    def series_steps(self, series: str) -> npt.NDArray[np.int64]:
        """Return the global steps at which any rank recorded the series, in any part."""
        _schema(series)
        steps = [file.steps(series) for file in self._files]
        return np.unique(np.concatenate(steps)) if steps else np.zeros(0, dtype=np.int64)

    def has(self, series: str) -> bool:
        """Return whether the series was recorded at all."""
        _schema(series)
        return any(file.last[f"series_{series}"] for file in self._files)

    def coverage(self) -> Coverage:
        """Return how many steps were taken, and at how many the loss and gradients were recorded."""
        losses = len(self.scalar("loss").steps) + int((self.scalar("loss", "number").values - 1).sum())
        return Coverage(self.last_step() + 1, losses, len(self.series_steps("gradient")))

    def loss_label(self) -> str:
        """Return what ``loss`` mostly is: ``loss``, or ``sum of N losses`` where nothing divides them."""
        sums = self.scalar("losses").values
        is_usual = 2 * len(sums) > len(self.scalar("backwards").steps)
        return f"sum of {int(np.median(sums))} losses" if is_usual else "loss"

    def last_step(self) -> int:
        """Return the last global step that any rank took, recorded or not; -1 where there is none."""
        return max((last_step(opened) for opened in self._opened), default=-1)

    def frame(
        self, series: str, column: str, *, attempt: int | None = None, rank: int | None = None, part: int = 0
    ) -> Frame:
        """Return one column of a series, stored or derived, over global steps and all parameters.

        Ranks are joined as the schema says unless one is named; where two attempts hold a step, the later
        one counts. The arrays are shared between calls: do not write into them.

        Raises
        ------
        KeyError
            If there is no such series or column.
        """
        schema = _schema(series)
        unit = frames.unit(schema, column)
        if unit is None:
            columns = ", ".join([c.name for c in schema.columns] + [d.name for d in schema.derived])
            raise KeyError(f"series {series!r} has no column {column!r}; it has {columns}")
        groups = self._by_attempt(attempt, rank)
        files = [file for group in groups for file in group]
        key = (self._owner, series, column, attempt, rank, part)

        def read(window: Window | None, after: Mapping[RankFile, int]) -> Frame:
            wanted = frames.needs(schema, column)
            blocks = [
                frames.block(
                    group,
                    series,
                    wanted,
                    self._names,
                    part,
                    functools.partial(self._holders_of, group) if rank is None else None,
                    window,
                    after,
                )
                for group in groups
                if any(after.get(file, -1) < file.last[f"series_{series}"] for file in group)
            ]
            if not blocks:
                empty = np.zeros((0, len(self._names)))
                blocks = [Block(np.zeros(0, dtype=np.int64), dict.fromkeys(wanted, empty), empty != 0)]
            joined = frames.join_attempts(blocks)
            values = frames.derive(column, joined.columns)
            return Frame(joined.steps, self._names, values, joined.measured, unit, joined.any_rank)

        return self._cache.frame(key, files, self._names, series, read)

    def __repr__(self) -> str:
        """Return path, status and last step."""
        return f"Run({str(self.path)!r}, {self.status.value}, last step {self.last_step()})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays: status, verdict, curves and findings."""
        return DISPLAYS["run"](self)

    def report(self) -> str:
        """Return the report as HTML; a notebook shows it inline, offline."""
        return DISPLAYS["report"](self)

    def scalar(
        self, name: str, source: str = "backlight", *, attempt: int | None = None, rank: int | None = None
    ) -> Scalar:
        """Return a scalar over global steps.

        Without a rank: the loss is the mean over ranks, norms of the whole follow from the joined gradients,
        and of any other scalar the lowest rank that logged a step counts.

        Of a long run, values of every step are means over bins of the old steps (an event ``thinned`` says
        of how many); the sources ``minimum``, ``maximum`` and ``number`` give the rest of each bin.

        No values where backlight records such a scalar, as ``clip/norm``, and did not in this run.

        Raises
        ------
        KeyError
            If nothing of that name was logged in any attempt; the message has the nearest name.
        """
        whole = rank is None and source == "backlight"
        merged = []
        for files in self._by_attempt(attempt, rank):
            if whole and name in frames.FROM_TOTAL and not frames.alone(files):
                norms = functools.partial(self.frame, "gradient", "norm", attempt=files[0].attempt)
                merged.append(frames.from_total(files, name, norms))
            else:
                by_rank = frames.scalars(files, storable(source), storable(name))
                is_mean = whole and name.partition("/")[0] in frames.MEANS
                join = frames.mean if is_mean else frames.lowest
                merged.append(join(by_rank))
        scalar = Scalar(*latest(merged), unit_of_scalar(name, source))
        if not len(scalar.steps):
            self._require(name, source)
        return scalar

    def spread(self, name: str, source: str = "backlight", *, attempt: int | None = None) -> Spread:
        """Return a scalar of every rank over global steps, as each logged it: its own loss, its own norm.

        Where two attempts hold a step, the later one counts. A name that was never logged raises KeyError as
        in :meth:`scalar`.
        """
        self._require(name, source)
        logged = [
            frames.scalars(files, storable(source), storable(name))
            for files in self._by_attempt(attempt, None)
        ]
        return frames.spread(logged, unit_of_scalar(name, source))

    def scalar_names(self, source: str | None = None) -> tuple[str, ...]:
        """Return the names of the scalars of a source, or of all, in the order of their first use."""
        names = [n for file in self._files for _, of, n in file.scalar_names if source in {None, of}]
        return tuple(dict.fromkeys(names))

    def _require(self, name: str, source: str) -> None:
        """Raise KeyError if no attempt logged the scalar, and backlight records none of that name."""
        sources = ("backlight", "user", *SOURCES)
        if source not in sources:
            raise KeyError(f"no scalars have the source {source!r}{did_you_mean(source, sources)}")
        of, other = ("user", "backlight") if source == "user" else ("backlight", "user")
        names = self.scalar_names(of)
        if storable(name) in names or (of == "backlight" and is_optional_scalar(name)):
            return
        hint = did_you_mean(name, names)
        near = [n for n in names if name.lower() in n.lower() or n.lower() in name.lower()]
        if storable(name) in self.scalar_names(other):
            hint = f"; it is recorded with source={other!r}"
        elif near and "did you mean" not in hint:
            hint = f"; did you mean {max(near, key=len)!r}?"
        what = "no scalar that the script logged" if of == "user" else "no scalar"
        raise KeyError(f"{self.location}: {what} is called {name!r}{hint}")

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Return the events of a kind, or of all, by attempt, time and rank."""
        out = [
            Event(step, when, what, payload, file.rank, file.attempt)
            for file in [*self._files, *self._watchdogs]
            for step, when, what, payload in file.events(kind)
        ]
        return tuple(sorted(out, key=lambda e: (e.attempt, e.time, e.rank)))

    def stored_findings(self) -> tuple[Finding, ...]:
        """Return the stored findings."""
        return tuple(f for file in [*self._files, *self._watchdogs] for f in file.findings())

    def fingerprint(self, attempt: int = -1, rank: int = 0) -> Fingerprint | None:
        """Return the fingerprint of one rank of one attempt (-1: the newest), None where none was stored."""
        chosen = self._opened[-1:] if attempt == -1 else [o for o in self._opened if o.entry.index == attempt]
        return chosen[0].fingerprints.get(rank) if chosen else None

    def array_names(self) -> tuple[str, ...]:
        """Return the names of the stored arrays, sorted."""
        return tuple(sorted({info.name for info in array_infos(self._opened, self._lost)}))

    def array_info(self, name: str) -> ArrayInfo:
        """Return dims, type, unit and encoding of a stored array, as it was recorded last.

        Raises
        ------
        KeyError
            If there is no array of that name.
        """
        infos = array_infos(self._opened, self._lost, storable(name))
        if not infos:
            hint = did_you_mean(name, self.array_names())
            raise KeyError(f"{self.location}: no array is called {name!r}{hint}")
        return infos[-1]

    def array(
        self, name: str, *, attempt: int | None = None, rank: int | None = None
    ) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[Any]]]:
        """Return the global steps of a stored array and its value at each; bfloat16 comes as float32.

        A later attempt wins a step, then the lowest rank.

        Raises
        ------
        KeyError
            If no attempt stored an array of that name; the message has the nearest name.
        """
        steps, values = array_values(self._opened, storable(name), attempt, rank, self._lost)
        if not values:
            self.array_info(name)
        return steps, values

    def evidence(self) -> tuple[str, ...]:
        """Return the paths of the evidence files, below the run directory."""
        return evidence_paths(self.path, self._opened)

    def read_evidence(self, path: str) -> bytes:
        """Return the content of one of :meth:`evidence`.

        Raises
        ------
        KeyError
            If the run has no such file; no other path is ever opened.
        OSError
            If it is no regular file of the run's owner, or larger than :data:`MAX_EVIDENCE_BYTES`.
        """
        if path not in self.evidence():
            raise KeyError(
                f"{self.path} has no evidence {path!r}; it has {', '.join(self.evidence()) or 'none'}"
            )
        file = self.path / path
        return untrusted_files.read(file, MAX_EVIDENCE_BYTES, owners=untrusted_files.owners_beside(file))

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        return frames.model_order([names for file in self._files for names in file.table_names.values()])

    def _holders_of(self, files: Sequence[RankFile]) -> Holders:
        """Return how the ranks of an attempt, all of whose files are given, hold its parameters."""
        index = files[0].attempt
        if index not in self._holders:
            self._holders[index] = frames.holders_of(files, self._names)
        return self._holders[index]

    def _by_attempt(self, attempt: int | None, rank: int | None) -> list[Sequence[RankFile]]:
        chosen = [o for o in self._opened if attempt is None or o.entry.index == attempt]
        groups = [[file for file in opened.files if rank in {None, file.rank}] for opened in chosen]
        return [files for files in groups if files]


def open_run(path: str | Path, progress: Progress | None = None) -> Run:
    """Open the run in a directory for reading; nothing in it is changed, and nothing in it is executed.

    A directory that does not exist, is no run, is damaged beyond reading or has another format raises a
    :class:`RunFormatError` with the reason and the fix. Where only a part is lost, the rest is returned and
    ``losses`` lists what is missing.

    ``progress`` is that of the first rank in the newest attempt where the caller knows it better than the
    directory, as the process does that could not write to its end.

    A URL (``s3://bucket/run``) is read through fsspec: of a compacted run only what is asked for, else all.
    """
    if not is_url(path):
        return Run(Path(path), progress=progress)
    mirror = Mirror(str(path))
    run = Run(mirror.folder)
    run.mirror = mirror
    return run


def open_growing(cache: DecodeCache | None = None) -> Callable[[Path], Run]:
    """Return a function that opens a growing run, each time decoding only the rows since the last reading."""
    return functools.partial(Run, cache=cache or DecodeCache())


def _attempt(opened: AttemptFiles) -> Attempt:
    entry = opened.entry
    return Attempt(
        index=entry.index,
        step_offset=entry.step_offset,
        status=entry.progress.status_now(),
        started=entry.started,
        ended=entry.progress.ended,
        world_size=entry.world_size,
        argv=entry.argv,
        ranks=opened.ranks,
        script=entry.script,
    )


def _schema(series: str) -> SeriesSchema:
    if series not in SERIES:
        raise KeyError(f"no series is called {series!r}; there are {', '.join(SERIES)}")
    return SERIES[series]
