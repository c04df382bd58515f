"""Reading a run: without torch, without writing into the folder, while it is written and after a kill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.records import Finding, Fingerprint, ParameterRecord, RunStatus
from backlight.store import frames
from backlight.store.errors import RunFormatError
from backlight.store.frames import Block, Frame
from backlight.store.manifest import AttemptEntry, attempt_folder, read_manifest
from backlight.store.ranks import RankFile
from backlight.store.schema import SCALARS, SERIES

__all__ = ["Attempt", "Event", "Frame", "Run", "RunFormatError", "Scalar", "open_run"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the training: ``ended`` is None where it is not known."""

    index: int
    step_offset: int
    status: RunStatus
    started: float
    ended: float | None
    world_size: int
    argv: tuple[str, ...]
    ranks: tuple[int, ...]


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
        self._losses: list[str] = []
        self._files: list[RankFile] = []
        attempts = []
        for entry in self._manifest.attempts:
            files = self._open_files(entry)
            self._files += files
            attempts.append(
                Attempt(
                    entry.index,
                    entry.step_offset,
                    entry.status_now(),
                    entry.started,
                    entry.ended,
                    entry.world_size,
                    entry.argv,
                    tuple(file.rank for file in files),
                )
            )
        self.attempts = tuple(attempts)

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
    def rooms(self) -> tuple[str, ...]:
        """Return the rooms that watched, over all attempts."""
        return tuple(dict.fromkeys(room for a in self._manifest.attempts for room in a.rooms))

    @property
    def groups(self) -> Mapping[str, str]:
        """Return the named groups of parameters with their patterns."""
        return self._manifest.groups

    @property
    def overrides(self) -> Mapping[str, Mapping[str, float]]:
        """Return the thresholds that the user changed, by room."""
        return self._manifest.overrides

    @property
    def losses(self) -> tuple[str, ...]:
        """Return in words what is known to be lost or unreadable; empty when the run is whole."""
        return tuple(self._losses)

    def parameters(self) -> tuple[ParameterRecord, ...]:
        """Return every parameter of any table, in model order, as its newest table describes it."""
        newest: dict[str, ParameterRecord] = {}
        for file in self._files:
            for table in file.tables().values():
                newest.update({p.name: p for p in table})
        return tuple(newest[name] for name in self._names())

    def series_steps(self, series: str) -> npt.NDArray[np.int64]:
        """Return the global steps at which any rank recorded the series."""
        self._schema(series)
        steps = [file.steps(series) for file in self._files]
        return np.unique(np.concatenate(steps)) if steps else np.zeros(0, dtype=np.int64)

    def has(self, series: str) -> bool:
        """Tell whether the series was recorded at all."""
        return len(self.series_steps(series)) > 0

    def last_step(self) -> int:
        """Return the last global step of anything recorded, -1 where there is nothing."""
        return max((file.last_step() for file in self._files), default=-1)

    def frame(
        self, series: str, column: str, *, attempt: int | None = None, rank: int | None = None, part: int = 0
    ) -> Frame:
        """Return one column of a series over global steps and all parameters."""
        schema = self._schema(series)
        unit = frames.unit(schema, column)
        if unit is None:
            known = ", ".join(c.name for c in (*schema.columns, *schema.derived))
            raise KeyError(f"series {series!r} has no column {column!r}; it has {known}")
        wanted = frames.needs(schema, column)
        names = self._names()
        blocks = []
        for files in self._by_attempt(attempt, rank):
            parts = [frames.rank_block(file, series, wanted, names, part) for file in files]
            records = [{p.name: p for t in file.tables().values() for p in t} for file in files]
            blocks.append(frames.join_ranks(parts, records, series, names))
        if not blocks:
            empty = np.zeros((0, len(names)))
            blocks = [Block(np.zeros(0, dtype=np.int64), dict.fromkeys(wanted, empty), empty != 0)]
        joined = frames.join_attempts(blocks)
        return Frame(joined.steps, names, frames.derive(column, joined.columns), joined.measured, unit)

    def scalar(
        self, name: str, source: str = "backlight", *, attempt: int | None = None, rank: int | None = None
    ) -> Scalar:
        """Return a scalar over global steps; without a rank, the lowest rank that logged a step counts."""
        merged: dict[int, float] = {}
        for files in self._by_attempt(attempt, rank):
            mine: dict[int, float] = {}
            for file in reversed(files):
                for identifier, of, called in file.scalar_names():
                    if (of, called) == (source, name):
                        steps, values = file.scalar(identifier)
                        mine.update(zip(steps.tolist(), values.tolist(), strict=True))
            merged.update(mine)
        schema = SCALARS.get(name) or SCALARS.get(name.split("/", maxsplit=1)[0])
        unit = schema.unit if schema is not None and source == "backlight" else "1"
        order = sorted(merged)
        return Scalar(
            np.array(order, dtype=np.int64), np.array([merged[s] for s in order], dtype=np.float64), unit
        )

    def scalar_names(self, source: str | None = None) -> tuple[str, ...]:
        """Return the names of the scalars of a source, or of all, in the order of their first use."""
        names = [n for file in self._files for _, of, n in file.scalar_names() if source in {None, of}]
        return tuple(dict.fromkeys(names))

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Return the events of a kind, or of all, by attempt, time and rank."""
        out = [
            Event(step, when, what, payload, file.rank, file.attempt)
            for file in self._files
            for step, when, what, payload in file.events(kind)
        ]
        return tuple(sorted(out, key=lambda e: (e.attempt, e.time, e.rank)))

    def stored_findings(self) -> tuple[Finding, ...]:
        """Return the findings that were stored, as they were made."""
        return tuple(finding for file in self._files for finding in file.findings())

    def fingerprint(self, attempt: int = -1, rank: int = 0) -> Fingerprint | None:
        """Return the fingerprint of one rank of one attempt (-1: the newest), None where none was stored."""
        if not self.attempts:
            return None
        index = self.attempts[attempt].index if attempt < 0 else attempt
        for file in self._files:
            if (file.attempt, file.rank) == (index, rank):
                return file.fingerprint()
        return None

    def _schema(self, series: str) -> Any:
        if series not in SERIES:
            raise KeyError(f"no series is called {series!r}; there are {', '.join(SERIES)}")
        return SERIES[series]

    def _names(self) -> tuple[str, ...]:
        return frames.model_order([[p.name for p in t] for f in self._files for t in f.tables().values()])

    def _by_attempt(self, attempt: int | None, rank: int | None) -> list[Sequence[RankFile]]:
        out: list[Sequence[RankFile]] = []
        for known in self.attempts:
            if attempt is None or known.index == attempt:
                files = [f for f in self._files if f.attempt == known.index and rank in {None, f.rank}]
                if files:
                    out.append(files)
        return out

    def _open_files(self, entry: AttemptEntry) -> list[RankFile]:
        folder = self.path / attempt_folder(entry.index)
        live = entry.status is RunStatus.RUNNING and entry.process.alive() is True
        files = []
        for path in sorted(folder.glob("rank-*.db")):
            digits = path.stem.removeprefix("rank-")
            if not digits.isdecimal():
                continue
            try:
                files.append(
                    RankFile(
                        path,
                        attempt=entry.index,
                        rank=int(digits),
                        step_offset=entry.step_offset,
                        live=live,
                    )
                )
            except RunFormatError as error:
                self._losses.append(str(error))
        return files


def open_run(path: str | Path) -> Run:
    """Open the run in a folder for reading.

    Raises
    ------
    RunFormatError
        If the folder is not there, is no run, is damaged, or has a newer format.
    """
    return Run(Path(path))
