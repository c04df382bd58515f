"""The columnar dataset of an attempt that no process writes any more: Parquet files and their index.

``columns-NNNNNN`` in the folder of the attempt holds

=========================== ==================================================================================
``index.json``              :class:`Index`: ranks, axes, and the bytes of every other file
``SERIES.parquet``          a series as each rank recorded it: row groups of one rank and one part
``SERIES-joined.parquet``   the same joined over ranks, where that is not what a single rank recorded
``scalars.parquet``         scalars of each rank
``events.parquet``, ``findings.parquet``, ``tables.parquet``    the rest, as in the database of a rank
=========================== ==================================================================================

Rows of a series are a grid: each step has a row for every parameter of its axis, in order. Steps are global.
pyarrow decodes columns and row groups in parallel, and checks pages against their checksums. Every error is a
:class:`RunFormatError` of one line.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight import codec, untrusted_files
from backlight.series import SERIES
from backlight.store.errors import RunFormatError
from backlight.store.format.manifest import check_format, read_document
from backlight.store.format.schema import FORMAT_VERSION, ROWS
from backlight.store.read.rank_file import (
    NOTHING,
    Array,
    Block,
    Logged,
    RankFile,
    Steps,
    Table,
    Window,
    latest,
    table_of,
)
from backlight.store.read.remote import mirror_of
from backlight.store.read.snapshot import Rows

INDEX = "index.json"
INDEX_KIND = "backlight columns"
JOINED = "-joined"

MAX_GROUP_ROWS = 1_000_000
"""Rows of a row group that is written."""

MAX_FILE_BYTES = 1024**4
"""Larger files are refused."""

MAX_CLAIMED_ROWS = 16_000_000
"""Rows of a row group that is read: a damaged one could claim any number."""

MAX_ROWS_PER_BYTE = 1000
"""Rows per byte of a file: nothing that is recorded compresses that far."""

FREE_ROWS = 1_000_000
"""Rows of a file of any size."""

_TYPES = {"rank": "int64", "part": "int64", "step": "int64", "time": "float64", "value": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """One rank: ``axis``, the lists of its ``tables`` (by id) and ``scalars`` are positions in the index.

    ``rows`` holds how many rows of each table the rank has, ``last_step`` its last global step.
    """

    rank: int
    axis: int
    tables: tuple[tuple[int, int], ...]
    scalars: int
    rows: dict[str, int]
    last_step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The whole of ``index.json``.

    ``names`` are lists of names of parameters, of which the first is the axis of the joined series;
    ``scalars`` are lists of sources and names; ``files`` gives the bytes of each file.
    """

    run_id: str
    launch: str
    ranks: tuple[RankIndex, ...]
    names: tuple[tuple[str, ...], ...]
    scalars: tuple[tuple[tuple[str, str], ...], ...]
    files: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT_VERSION


class ParquetFile:
    """A Parquet file, of which row groups are read where they may hold what is asked for.

    ``path`` is for messages where ``source`` is open.
    """

    def __init__(self, path: Path, size: int, source: Any = None) -> None:
        self.path = path
        try:
            import pyarrow.dataset as ds  # noqa: PLC0415 - an optional library
            from pyarrow import fs  # noqa: PLC0415 - as above
        except ImportError:
            raise RunFormatError(
                f"{path}: reading a compacted run needs pyarrow, which is not installed: "
                "pip install 'backlight[parquet]'"
            ) from None
        options = ds.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=True)
        layout = ds.ParquetFileFormat(default_fragment_scan_options=options)
        with self._reading():
            local = fs.LocalFileSystem() if source is None else None
            self._file: Any = layout.make_fragment(source or str(path), local)
            footer: Any = self._file.metadata
            rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
            if min(rows, default=0) < 0 or max(rows, default=0) > MAX_CLAIMED_ROWS:
                raise ValueError(f"a row group claims {max(rows, key=abs)} rows")
            if sum(rows) > max(FREE_ROWS, MAX_ROWS_PER_BYTE * size):
                raise ValueError(f"{size} bytes claim {sum(rows)} rows")

    def read(self, columns: Sequence[str], **between: tuple[Any, Any]) -> Any:
        """Return columns as ``pyarrow.Table``, of rows with others ``between`` two values, both included."""
        import pyarrow.dataset as ds  # noqa: PLC0415 - an optional library

        bounds = [(ds.field(c) >= low) & (ds.field(c) <= high) for c, (low, high) in between.items()]
        with self._reading():
            missing = [c for c in (*columns, *between) if c not in self._file.physical_schema.names]
            if missing:
                raise ValueError(f"it has no column {missing[0]!r}")
            chosen = functools.reduce(operator.and_, bounds) if bounds else None
            return self._file.to_table(columns=list(columns), filter=chosen)

    def numbers(self, table: Any, column: str, kind: str) -> npt.NDArray[Any]:
        """Return a column as numbers of a dtype, or refuse another type and missing values."""
        with self._reading():
            chunked = table[column]
            if chunked.null_count or chunked.type.to_pandas_dtype() is not np.dtype(kind).type:
                raise ValueError(
                    f"column {column!r} is {chunked.type} with {chunked.null_count} missing values"
                )
            values: npt.NDArray[Any] = chunked.to_numpy()
        return values

    def damaged(self, problem: object) -> RunFormatError:
        """Return the error of a file whose content is not what it must be."""
        reason = str(problem).strip().partition("\n")[0]
        return RunFormatError(f"{self.path}: is damaged: {reason}; restore it from a copy of the run")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        import pyarrow as pa  # noqa: PLC0415 - an optional library

        try:
            yield
        except (pa.ArrowException, OSError, ValueError, TypeError, MemoryError, OverflowError) as error:
            raise self.damaged(error) from error


class ColumnarDataset:
    """The dataset in a folder, of the files that its index lists."""

    def __init__(self, location: Path) -> None:
        self.location = location
        path = location / INDEX
        try:
            data = read_document(path)
            if data.get("kind") != INDEX_KIND:
                raise RunFormatError(f"{path}: has kind {data.get('kind')!r}, expected {INDEX_KIND!r}")
            check_format(path, data.get("format"))
            self.index = codec.convert(data, Index)
            _check(self.index)
            owners = untrusted_files.owners_beside(path)
            self._mirror = mirror_of(path)
            for name, size in self.index.files.items():
                if self._mirror is None:
                    bytes_there = untrusted_files.check(location / name, MAX_FILE_BYTES, owners=owners)
                else:
                    bytes_there = self._mirror.sizes.get(location / name, 0)
                if bytes_there != size:
                    raise RunFormatError(
                        f"{location / name}: has {bytes_there} bytes, expected {size}; restore it from a copy"
                    )
        except OSError as error:
            raise RunFormatError(f"{error.filename}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RunFormatError(f"{path}: is damaged: {error}; restore it from a copy") from None
        self._files: dict[str, ParquetFile] = {}
        self._scalars: dict[tuple[str, str], dict[int, Logged]] = {}

    def joined(
        self, series: str, columns: Sequence[str], names: Sequence[str], part: int, window: Window | None
    ) -> Block | None:
        """Return columns joined over ranks, None where they are those of the only rank."""
        file = self._file(f"{series}{JOINED}")
        return None if file is None else _grid(file, columns, self.index.names[0], names, part, window)

    def block(
        self,
        series: str,
        rank: RankIndex,
        columns: Sequence[str],
        names: Sequence[str],
        part: int,
        window: Window | None,
    ) -> Block:
        """Return columns as one rank recorded them."""
        file = self._file(series)
        if file is None:
            return _void(columns, np.zeros(0, np.int64), names, SERIES[series].integers)
        return _grid(file, columns, self.index.names[rank.axis], names, part, window, rank.rank)

    def steps(self, series: str, rank: RankIndex, part: int | None = None) -> Steps:
        """Return the global steps of a series of a rank, sorted, each once."""
        file = self._file(series)
        P = len(self.index.names[rank.axis])
        if file is None or not P:
            return np.zeros(0, np.int64)
        chosen = {} if part is None else {"part": (part, part)}
        table = file.read(["step"], rank=(rank.rank, rank.rank), **chosen)
        return np.unique(file.numbers(table, "step", "int64")[::P])

    def parts(self, series: str, rank: RankIndex) -> list[int]:
        """Return the parts of which rows of a series of a rank were recorded, sorted."""
        file = self._file(series)
        if file is None:
            return []
        table = file.read(["part"], rank=(rank.rank, rank.rank))
        return [int(part) for part in np.unique(file.numbers(table, "part", "int64"))]

    def scalar(self, source: str, name: str) -> Mapping[int, Logged]:
        """Return one scalar of every rank that logged it."""
        if (source, name) not in self._scalars:
            self._scalars[source, name] = self._read_scalar(source, name)
        return self._scalars[source, name]

    def _read_scalar(self, source: str, name: str) -> dict[int, Logged]:
        file = self._file("scalars")
        if file is None:
            return {}
        table = file.read(["rank", "step", "value"], name=(name, name), source=(source, source))
        rank_N, step_N, value_N = (file.numbers(table, c, _TYPES[c]) for c in ("rank", "step", "value"))
        cuts = np.flatnonzero(np.diff(rank_N)) + 1
        parts = zip(*(np.split(column, cuts) for column in (rank_N, step_N, value_N)), strict=True)
        return {int(ranks[0]): (steps, values) for ranks, steps, values in parts if len(ranks)}

    @functools.cached_property
    def events(self) -> Mapping[int, Rows]:
        """Global step, time, kind and payload of the events by rank."""
        return self._by_rank("events", "step", "time", "kind", "payload")

    @functools.cached_property
    def findings(self) -> Mapping[int, Rows]:
        """JSON of the findings by rank."""
        return self._by_rank("findings", "json")

    def tables(self, rank: int) -> dict[int, Table]:
        """Return the parameter tables of a rank by id."""
        file = self._file("tables")
        if file is None:
            return {}
        table = file.read(["id", "json"], rank=(rank, rank))
        try:
            return {i: table_of(text) for i, text in zip(*table.to_pydict().values(), strict=True)}
        except (ValueError, TypeError, RecursionError) as error:
            raise file.damaged(error) from None

    def _by_rank(self, name: str, *columns: str) -> Mapping[int, Rows]:
        out: dict[int, Rows] = {}
        if (file := self._file(name)) is not None:
            table = file.read(["rank", *columns])
            for rank, *row in zip(*(table[c].to_pylist() for c in ("rank", *columns)), strict=True):
                out.setdefault(rank, []).append(tuple(row))
        return out

    def _file(self, name: str) -> ParquetFile | None:
        """Return one of the files, None where nothing of the kind was recorded."""
        path = self.location / f"{name}.parquet"
        if name not in self._files and path.name in self.index.files:
            source = None if self._mirror is None else self._mirror.open(path)
            self._files[name] = ParquetFile(path, self.index.files[path.name], source)
        return self._files.get(name)


class ColumnarRank(RankFile):
    """One rank of a dataset, with the answers of the databases that it replaces."""

    def __init__(self, dataset: ColumnarDataset, rank: RankIndex, *, attempt: int, step_offset: int) -> None:
        self.path = dataset.location
        self.inode = dataset.location.stat().st_ino
        self.attempt = attempt
        self.rank = rank.rank
        self.step_offset = step_offset
        self.losses = {}
        self.dataset = dataset
        self._index = rank
        self.last = {name: rank.rows.get(name, 0) for name in ROWS}
        self.last_step = rank.last_step
        names, scalars = dataset.index.names, dataset.index.scalars[rank.scalars]
        self.table_names = {table: names[i] for table, i in rank.tables}
        self.scalar_names = tuple((i, source, name) for i, (source, name) in enumerate(scalars, start=1))

    @functools.cached_property
    def tables(self) -> dict[int, Table]:
        """Parameter tables by id, in the order of their first use."""
        return self.dataset.tables(self.rank)

    def steps(self, series: str, part: int | None = None, after: int = 0) -> Steps:
        """Return the global steps of a series, sorted, each once; none is behind another reading."""
        return self.dataset.steps(series, self._index, part)

    def block(
        self,
        series: str,
        columns: Sequence[str],
        names: Sequence[str],
        part: int,
        window: Window | None = None,
        after: int = 0,
    ) -> Block:
        """Return stored columns of one part over the parameters ``names``."""
        return self.dataset.block(series, self._index, columns, names, part, window)

    def parts(self, series: str) -> list[int]:
        """Return the parts of which rows of a series were recorded, sorted."""
        return self.dataset.parts(series, self._index)

    def is_thinned_after(self, row: int) -> bool:
        """Return False: nothing is added, and names of what belongs to means are stored."""
        return False

    def scalars(self, name: int | None = None, after: int = 0) -> dict[int, Logged]:
        """Return the scalars by id, of all names or of one."""
        chosen = [row for row in self.scalar_names if name in {None, row[0]}]
        return {i: self.scalar(source, called) for i, source, called in chosen}

    def scalar(self, source: str, name: str) -> Logged:
        """Return one scalar."""
        return latest([self.dataset.scalar(source, name).get(self.rank, NOTHING)])

    def last_scalar(self, source: str, name: str) -> float | None:
        """Return the value of a scalar at the last step that has one; None without any."""
        values = self.scalar(source, name)[1]
        return float(values[-1]) if len(values) else None

    @functools.cached_property
    def event_rows(self) -> Rows:
        """Local step, time, kind and JSON of the events."""
        rows = self.dataset.events.get(self.rank, [])
        return [(step if step is None else step - self.step_offset, *rest) for step, *rest in rows]

    @functools.cached_property
    def finding_rows(self) -> Rows:
        """JSON of the findings."""
        return self.dataset.findings.get(self.rank, [])


def _check(index: Index) -> None:
    """Raise ValueError where positions or names in an index lead out of it."""
    for rank in index.ranks:
        lists = [rank.axis, *(i for _, i in rank.tables)]
        if not all(0 <= i < len(index.names) for i in lists) or not 0 <= rank.scalars < len(index.scalars):
            raise ValueError(f"rank {rank.rank} refers to lists that are not there")
    if not index.names or len({rank.rank for rank in index.ranks}) != len(index.ranks):
        raise ValueError("it has no axis, or a rank twice")
    for name in index.files:
        if Path(name).name != name or not name.endswith(".parquet"):
            raise ValueError(f"it lists the file {name!r}")


def _grid(
    file: ParquetFile,
    columns: Sequence[str],
    axis: Sequence[str],
    names: Sequence[str],
    part: int,
    window: Window | None,
    rank: int | None = None,
) -> Block:
    """Return columns of a series, whose rows are steps by the parameters ``axis``, over ``names``."""
    between: dict[str, tuple[Any, Any]] = {"part": (part, part)}
    if window is not None:
        between["step"] = window[0], window[1] - 1
    if rank is not None:
        between["rank"] = rank, rank
    masks = ["measured"] if rank is not None else ["measured", "any_rank"]
    integers = {c.name for c in SERIES[file.path.stem.removesuffix(JOINED)].columns if c.integer}
    table = file.read(list(dict.fromkeys(["step", *masks, *columns])), **between)
    P = len(axis)
    if table.num_rows % max(P, 1):
        raise file.damaged(f"{table.num_rows} rows are no steps of {P} parameters")

    def shaped(column: str, kind: str) -> Array:
        return file.numbers(table, column, kind).reshape(-1, P)

    step_SP = shaped("step", "int64")
    steps = step_SP[:, 0] if P else np.zeros(0, np.int64)
    if (step_SP != steps[:, None]).any() or (np.diff(steps) <= 0).any():
        raise file.damaged("its steps are not in order")
    grids = {c: shaped(c, "int64" if c in integers else "float64") for c in columns if c != "measured"}
    mask = {c: shaped(c, "bool") for c in masks}
    if "measured" in columns:
        grids["measured"] = mask["measured"].astype(np.int64)
    if tuple(axis) != tuple(names):
        at_P = np.array([names.index(name) for name in axis], dtype=np.int64)
        void = _void(columns, steps, names, integers)
        for c, values in void.columns.items():
            values[:, at_P] = grids[c]
        grids = dict(void.columns)
        wide = {c: np.zeros((len(steps), len(names)), dtype=bool) for c in masks}
        for c, values in wide.items():
            values[:, at_P] = mask[c]
        mask = wide
    return Block(steps, {c: grids[c] for c in columns}, mask["measured"], mask.get("any_rank"))


def _void(columns: Sequence[str], steps: Steps, names: Sequence[str], integers: Any) -> Block:
    """Return columns in which nothing is measured."""
    shape = len(steps), len(names)
    values = {c: np.zeros(shape, np.int64) if c in integers else np.full(shape, np.nan) for c in columns}
    return Block(steps, values, np.zeros(shape, dtype=bool))
