"""Reading a run: without torch, without writing into the folder, while it is written and after a kill."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.records import Finding, Fingerprint, ParameterRecord, RunStatus
from backlight.registry import DISPLAYS
from backlight.store.errors import RunFormatError
from backlight.store.format.hdf5_pieces import ArrayInfo
from backlight.store.format.manifest import read_manifest
from backlight.store.format.names import storable
from backlight.store.format.schema import SCALARS, SERIES, SeriesSchema
from backlight.store.read import arrays, frames, join_ranks
from backlight.store.read.attempt import OpenedAttempt, open_attempt
from backlight.store.read.frames import Block, Frame
from backlight.store.read.join_ranks import RankState, Spread
from backlight.store.read.rank_file import RankFile
from backlight.store.read.snapshot import beside, size_of

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

CACHE_BYTES = 256 * 1024 * 1024
"""Bytes of frames that a run keeps, because many rules ask for the same ones; and of rows, if all fit."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the training; ``ended`` is None where not known, ``ranks`` are those that can be read."""

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
    """A scalar over global steps; a step that was not logged is not there."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    unit: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; ``step`` is global, None where it belongs to no step."""

    step: int | None
    time: float
    kind: str
    payload: Mapping[str, Any]
    rank: int
    attempt: int


class Run:
    """A stored run as it was when it was opened; open it again to see what came since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self._opened: list[OpenedAttempt] = [open_attempt(path, entry) for entry in self._manifest.attempts]
        self._files: list[RankFile] = [file for opened in self._opened for file in opened.files]
        self._watchdogs: list[RankFile] = [file for opened in self._opened for file in opened.watchdogs]
        self._keep_rows()
        self._lost: dict[str, None] = {}
        self._order: tuple[str, ...] | None = None
        self._cache: OrderedDict[tuple[Any, ...], Frame] = OrderedDict()
        if not self._files and any(opened.unreadable for opened in self._opened):
            reasons = "; ".join(loss for opened in self._opened for loss in opened.losses)
            raise RunFormatError(f"{path}: nothing in this run can be read: {reasons}")
        self.attempts = tuple(_attempt(opened) for opened in self._opened)

    def _keep_rows(self) -> None:
        # Rules ask for one column after the other; a run that is small enough is read once for all of them.
        size = sum(size_of(file.path) + size_of(beside(file.path, "-wal")) for file in self._files)
        for file in self._files:
            file.keeps = size <= CACHE_BYTES

    @property
    def name(self) -> str:
        """Return the name that the run was given."""
        return self._manifest.name

    @property
    def run_id(self) -> str:
        """Return the id that all ranks and attempts share."""
        return self._manifest.run_id

    @property
    def status(self) -> RunStatus:
        """Return the status of the newest attempt."""
        return self.attempts[-1].status if self.attempts else RunStatus.UNKNOWN

    @property
    def monitors(self) -> tuple[str, ...]:
        """Return the monitors that watched, over all attempts."""
        return tuple(dict.fromkeys(monitor for a in self._manifest.attempts for monitor in a.monitors))

    @property
    def groups(self) -> Mapping[str, str]:
        """Return the named groups of parameters with their patterns."""
        return self._manifest.groups

    @property
    def overrides(self) -> Mapping[str, Mapping[str, float]]:
        """Return the thresholds that the user changed, by monitor."""
        return self._manifest.overrides

    @property
    def losses(self) -> tuple[str, ...]:
        """Return in words what is known to be lost or unreadable; empty when the run is whole.

        Damage inside a file is found where it is read, so this may grow as a run is used.
        """
        said = dict.fromkeys(loss for opened in self._opened for loss in opened.losses)
        for file in self._files:
            for _, _, _, payload in file.events("not_stored"):
                said[f"{file.path}: were not stored ({payload.get('reason')}): {payload.get('rows')}"] = None
            said |= file.losses
        for watchdog in self._watchdogs:
            said |= watchdog.losses
        return tuple(said | self._lost)

    def parameters(self) -> tuple[ParameterRecord, ...]:
        """Return every parameter of any table, in model order, as its newest table describes it.

        ``numel`` is that of the whole, also where ranks hold parts; how they do is said by the lowest rank.
        """
        newest: dict[str, ParameterRecord] = {}
        for opened in self._opened:
            for file in reversed(opened.files):
                for table in file.tables().values():
                    newest.update({p.name: p for p in table})
        return tuple(newest[name].unsharded() for name in self._names())

    def ranks(self, attempt: int = -1) -> tuple[RankState, ...]:
        """Return how far each rank of one attempt came, and how it ended (-1: the newest attempt)."""
        chosen = self._opened[-1:] if attempt == -1 else [o for o in self._opened if o.entry.index == attempt]
        return join_ranks.states(chosen[0]) if chosen else ()

    def series_steps(self, series: str) -> npt.NDArray[np.int64]:
        """Return the global steps at which any rank recorded the series, in any part."""
        _schema(series)
        steps = [file.steps(series) for file in self._files]
        return np.unique(np.concatenate(steps)) if steps else np.zeros(0, dtype=np.int64)

    def has(self, series: str) -> bool:
        """Tell whether the series was recorded at all."""
        _schema(series)
        return any(file.last[f"series_{series}"] for file in self._files)

    def last_step(self) -> int:
        """Return the last global step of anything recorded, -1 where there is nothing."""
        return max((file.last_step() for file in self._files), default=-1)

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
            known = ", ".join([c.name for c in schema.columns] + [d.name for d in schema.derived])
            raise KeyError(f"series {series!r} has no column {column!r}; it has {known}")
        key = (series, column, attempt, rank, part)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        wanted = frames.needs(schema, column)
        names = self._names()
        local = rank is not None
        blocks = [
            join_ranks.block(files, series, wanted, names, part, local)
            if local
            else self._joined(files, series, wanted, part)
            for files in self._by_attempt(attempt, rank)
        ]
        if not blocks:
            empty = np.zeros((0, len(names)))
            blocks = [Block(np.zeros(0, dtype=np.int64), dict.fromkeys(wanted, empty), empty != 0)]
        joined = frames.join_attempts(blocks)
        values = frames.derive(column, joined.columns)
        return self._kept(key, Frame(joined.steps, names, values, joined.measured, unit, joined.seen))

    def frame_at(self, series: str, column: str, step: int, *, rank: int | None = None) -> Frame:
        """Return :meth:`frame` at one step alone: of one row, or none where nothing was recorded."""
        whole = self.frame(series, column, rank=rank)
        row = whole.steps == step
        seen = None if whole.seen is None else whole.seen[row]
        return Frame(
            step + np.zeros(row.sum(), np.int64),
            whole.names,
            whole.values[row],
            whole.measured[row],
            whole.unit,
            seen,
        )

    def __repr__(self) -> str:
        """Return where the run is and how it stands."""
        return f"Run({str(self.path)!r}, {self.status.value}, last step {self.last_step()})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: status, verdict, curves and findings as they stand."""
        return DISPLAYS["run"](self)

    def to_pandas(self, table: str = "steps", columns: Sequence[str] | None = None) -> Any:
        """Return a table of :mod:`backlight.store.export.tables` as ``pandas.DataFrame``.

        ``steps`` has a column per scalar, ``gradient`` a row per step and parameter; ``scalars``, ``events``,
        ``findings`` (those that were stored), ``parameters`` and ``attempts`` are others. What was not
        measured is null; units stand in ``attrs["units"]``. An unknown name raises a KeyError.
        """
        from backlight.store.export import dataframes  # noqa: PLC0415 - pandas and pyarrow are not everybody's

        return dataframes.as_pandas(dataframes.table_of(self, table, columns))

    def to_polars(self, table: str = "steps", columns: Sequence[str] | None = None) -> Any:
        """Return the same as ``polars.DataFrame``."""
        from backlight.store.export import dataframes  # noqa: PLC0415 - polars and pyarrow are not everybody's

        return dataframes.as_polars(dataframes.table_of(self, table, columns))

    def scalar(
        self, name: str, source: str = "backlight", *, attempt: int | None = None, rank: int | None = None
    ) -> Scalar:
        """Return a scalar over global steps.

        Without a rank: the loss is the mean over ranks, norms of the whole follow from the joined gradients,
        and of any other scalar the lowest rank that logged a step counts.
        """
        wanted = (storable(source), storable(name))
        whole = rank is None and source == "backlight"
        merged: dict[int, float] = {}
        for files in self._by_attempt(attempt, rank):
            if whole and name in join_ranks.FROM_TOTAL and not join_ranks.alone(files):
                norms = functools.partial(self._joined, files, "gradient", ("norm",), 0)
                merged.update(join_ranks.from_total(files, name, norms))
            else:
                values = join_ranks.scalars(files, *wanted)
                merged.update(
                    (join_ranks.mean if whole and name in join_ranks.MEANS else join_ranks.lowest)(values)
                )
        order = sorted(merged)
        values_S = np.array([merged[step] for step in order], dtype=np.float64)
        return Scalar(np.array(order, dtype=np.int64), values_S, _unit(name, source))

    def spread(self, name: str, source: str = "backlight", *, attempt: int | None = None) -> Spread:
        """Return a scalar of every rank over global steps, as each logged it: its own loss, its own norm.

        Where two attempts hold a step, the later one counts.
        """
        merged: dict[int, dict[int, float]] = {}
        for files in self._by_attempt(attempt, None):
            mine = join_ranks.scalars(files, storable(source), storable(name))
            for step in {step for values in mine.values() for step in values}:
                for values in merged.values():
                    values.pop(step, None)
            for rank, values in mine.items():
                merged.setdefault(rank, {}).update(values)
        return join_ranks.spread(merged, _unit(name, source))

    def scalar_names(self, source: str | None = None) -> tuple[str, ...]:
        """Return the names of the scalars of a source, or of all, in the order of their first use."""
        names = [n for file in self._files for _, of, n in file.scalar_names() if source in {None, of}]
        return tuple(dict.fromkeys(names))

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Return the events of a kind, or of all, by attempt, time and rank."""
        out = [
            Event(step, when, what, payload, file.rank, file.attempt)
            for file in [*self._files, *self._watchdogs]
            for step, when, what, payload in file.events(kind)
        ]
        return tuple(sorted(out, key=lambda e: (e.attempt, e.time, e.rank)))

    def stored_findings(self) -> tuple[Finding, ...]:
        """Return the findings that were stored, as they were made."""
        return tuple(f for file in [*self._files, *self._watchdogs] for f in file.findings())

    def fingerprint(self, attempt: int = -1, rank: int = 0) -> Fingerprint | None:
        """Return the fingerprint of one rank of one attempt (-1: the newest), None where none was stored."""
        chosen = self._opened[-1:] if attempt == -1 else [o for o in self._opened if o.entry.index == attempt]
        return chosen[0].fingerprints.get(rank) if chosen else None

    def array_names(self) -> tuple[str, ...]:
        """Return the names of the stored arrays, sorted."""
        return tuple(sorted({info.name for info in arrays.infos(self._opened, self._lost)}))

    def array_info(self, name: str) -> ArrayInfo:
        """Return dims, type, unit and encoding of a stored array, as it was recorded last.

        Raises
        ------
        KeyError
            If there is no array of that name.
        """
        found = arrays.infos(self._opened, self._lost, storable(name))
        if not found:
            raise KeyError(
                f"no array is called {name!r}; there are {', '.join(self.array_names()) or 'none'}"
            )
        return found[-1]

    def array(
        self, name: str, *, attempt: int | None = None, rank: int | None = None
    ) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[Any]]]:
        """Return the global steps of a stored array and its value at each; bfloat16 comes as float32.

        A later attempt wins a step, then the lowest rank. Nothing of that name gives no steps.
        """
        return arrays.values(self._opened, storable(name), attempt, rank, self._lost)

    def evidence(self) -> tuple[str, ...]:
        """Return the paths, below the run directory, of the files that findings may cite."""
        return arrays.evidence(self.path, self._opened)

    def read_evidence(self, path: str) -> bytes:
        """Return the content of one of :meth:`evidence`.

        Raises
        ------
        KeyError
            If the run has no such file; no other path is ever opened.
        """
        if path not in self.evidence():
            raise KeyError(
                f"{self.path} has no evidence {path!r}; it has {', '.join(self.evidence()) or 'none'}"
            )
        return (self.path / path).read_bytes()

    def _names(self) -> tuple[str, ...]:
        if self._order is None:
            tables = [[p.name for p in table] for file in self._files for table in file.tables().values()]
            self._order = frames.model_order(tables)
        return self._order

    def _by_attempt(self, attempt: int | None, rank: int | None) -> list[Sequence[RankFile]]:
        chosen = [o for o in self._opened if attempt is None or o.entry.index == attempt]
        groups = [[file for file in opened.files if rank in {None, file.rank}] for opened in chosen]
        return [files for files in groups if files]

    def _joined(self, files: Sequence[RankFile], series: str, columns: Sequence[str], part: int) -> Block:
        """Return stored columns of one attempt, its ranks joined."""
        return join_ranks.block(files, series, columns, self._names(), part, local=False)

    def _kept(self, key: tuple[Any, ...], frame: Frame) -> Frame:
        frame.values.flags.writeable = frame.measured.flags.writeable = False
        self._cache[key] = frame
        while sum(f.values.nbytes + f.measured.nbytes for f in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return frame


def open_run(path: str | Path) -> Run:
    """Open the run in a folder for reading; nothing in the folder is changed, and nothing in it is executed.

    A folder that is not there, is no run, is damaged beyond reading or has a newer format raises a
    :class:`RunFormatError` that says which, and what to do. Where only a part is lost, the rest is given and
    ``losses`` says what is missing.
    """
    return Run(Path(path))


def _attempt(opened: OpenedAttempt) -> Attempt:
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


def _unit(name: str, source: str) -> str:
    schema = SCALARS.get(name) or SCALARS.get(name.split("/", maxsplit=1)[0])
    return schema.unit if schema is not None and source == "backlight" else "1"


def _schema(series: str) -> SeriesSchema:
    if series not in SERIES:
        raise KeyError(f"no series is called {series!r}; there are {', '.join(SERIES)}")
    return SERIES[series]
