"""Conversion of the files of an attempt into a columnar dataset, verified before it gets its name."""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from backlight import atomic_files, codec
from backlight.series import SERIES, SeriesSchema
from backlight.store.errors import RunFormatError
from backlight.store.filesystem import pinned
from backlight.store.format.manifest import write_document
from backlight.store.format.names import columns_folders, columns_name, parse_columns
from backlight.store.format.schema import ROWS
from backlight.store.read import frames
from backlight.store.read.attempt_files import AttemptFiles, by_rank
from backlight.store.read.columnar import (
    INDEX,
    INDEX_KIND,
    JOINED,
    MAX_GROUP_ROWS,
    ColumnarDataset,
    Index,
    RankIndex,
)
from backlight.store.read.rank_file import NOTHING, Block, Logged, RankFile, Steps, Window, latest

COMPRESSION_LEVEL = 3
MIN_GROUP_ROWS = 100_000
"""Scalars, events and tables of many ranks share a row group up to so many rows."""

MAX_TABLE_BYTES = 8_000_000
"""The same for the text of parameter tables."""


def write_dataset(opened: AttemptFiles, every: int | None, advance: Callable[[int, int], object]) -> Path:
    """Write, verify and publish a dataset; return its folder, or publish nothing for a RunFormatError."""
    older = columns_folders(opened.folder)
    number = max((parse_columns(p.name) or 0 for p in older), default=-1) + 1
    target = opened.folder / columns_name(number)
    temporary = atomic_files.temporary_name(target)
    temporary.mkdir()
    try:
        with pinned(temporary) as folder:
            _Conversion(opened, folder, every, advance).run()
            for path in folder.iterdir():
                atomic_files.sync_file(path)
        losses = [loss for file in opened.files for loss in file.losses]
        if losses:  # copying the rest would hide the loss
            raise RunFormatError(losses[0])
        atomic_files.publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


class _Conversion:
    """One dataset while it is written: ``digests`` are those of the row groups of each file."""

    def __init__(
        self, opened: AttemptFiles, folder: Path, every: int | None, advance: Callable[[int, int], object]
    ) -> None:
        self.opened = opened
        self.folder = folder
        self.every = every
        self.advance = advance
        self.ranks = by_rank(opened.files)
        self.names: list[tuple[str, ...]] = [
            frames.model_order([t for f in opened.files for t in f.table_names.values()])
        ]
        self.axes = {
            rank: self._listed(frames.model_order([t for f in mine for t in f.table_names.values()]))
            for rank, mine in self.ranks.items()
        }
        self.digests: dict[str, list[int]] = {}
        self.rows: dict[int, dict[str, int]] = {rank: dict.fromkeys(ROWS, 0) for rank in self.ranks}

    def run(self) -> None:
        """Write all files and the index, and read them again."""
        for i, name in enumerate(SERIES):
            self._series(SERIES[name], i)
        self._lists()
        scalars = self._scalars()
        tables = self._tables()
        files = {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())}
        lists = list(dict.fromkeys(scalars.values()))
        index = Index(
            run_id=self.opened.run_id,
            launch=self.opened.entry.launch,
            ranks=tuple(
                RankIndex(
                    rank=rank,
                    axis=self.axes[rank],
                    tables=tables[rank],
                    scalars=lists.index(scalars[rank]),
                    rows={name: n for name, n in self.rows[rank].items() if n},
                    last_step=max(f.last_step for f in mine),
                )
                for rank, mine in self.ranks.items()
            ),
            names=tuple(self.names),
            scalars=tuple(lists),
            files=files,
        )
        write_document(self.folder / INDEX, {"kind": INDEX_KIND, **codec.plain(index)})
        self._verify()

    def _series(self, schema: SeriesSchema, done: int) -> None:
        files = [f for f in self.opened.files if f.last[f"series_{schema.name}"]]
        if not files:
            return
        kept = np.unique(np.concatenate([f.steps(schema.name) for f in files]))[:: self.every or 1]
        columns = [c.name for c in schema.columns if c.name != "measured"]
        with self._writer(schema.name, columns, schema) as write:
            for i, (rank, mine) in enumerate(self.ranks.items()):
                self.advance(done * len(self.ranks) + i, len(SERIES) * len(self.ranks))
                axis = self.names[self.axes[rank]]
                for part in _parts(mine, schema.name):
                    for window in _windows(kept, len(axis)):
                        blocks = [f.block(schema.name, columns, axis, part, window) for f in mine]
                        block = _only(frames.join_attempts(blocks), kept)
                        self.rows[rank][f"series_{schema.name}"] += len(block.steps)
                        write(rank, part, axis, block)
        if len(self.ranks) == 1 and frames.alone(self.opened.files):
            return
        axis = self.names[0]
        holders = frames.holders_of(self.opened.files, axis)
        with self._writer(f"{schema.name}{JOINED}", columns, schema) as write:
            for part in _parts(files, schema.name):
                for window in _windows(kept, len(axis)):
                    joined = frames.block(
                        self.opened.files, schema.name, columns, axis, part, lambda: holders, window
                    )
                    write(None, part, axis, _only(joined, kept))

    @contextlib.contextmanager
    def _writer(
        self, name: str, columns: Sequence[str], schema: SeriesSchema
    ) -> Iterator[Callable[[int | None, int, Sequence[str], Block], None]]:
        """Yield a function that writes a block of steps as one row group."""
        text = pa.dictionary(pa.int32(), pa.string())
        is_joined = name.endswith(JOINED)
        fields = [pa.field(c, pa.int64(), nullable=False) for c in ("rank", "part", "step")[is_joined:]]
        fields.append(pa.field("parameter", text, nullable=False))
        fields += [pa.field(c, pa.bool_(), nullable=False) for c in ("measured", "any_rank")[: 1 + is_joined]]
        kinds = {c: pa.int64() if c in schema.integers else pa.float64() for c in columns}
        units = {c.name: {"unit": c.unit, "meaning": c.meaning} for c in schema.columns}
        fields += [pa.field(c, kinds[c], nullable=False, metadata=units[c]) for c in columns]
        layout = pa.schema(fields)
        with self._file(name, layout, schema.floats) as write_table:

            def write(rank: int | None, part: int, axis: Sequence[str], block: Block) -> None:
                S, P = len(block.steps), len(axis)
                if S and not P:
                    raise RunFormatError(f"{self.opened.folder}: rank {rank} recorded steps of no parameters")
                if not S:
                    return
                out: dict[str, Any] = {"rank": np.full(S * P, -1 if rank is None else rank)}
                out |= {"part": np.full(S * P, part), "step": np.repeat(block.steps, P)}
                codes = pa.array(np.tile(np.arange(P, dtype=np.int32), S))
                out["parameter"] = pa.DictionaryArray.from_arrays(codes, pa.array(axis, pa.string()))
                out |= {"measured": block.measured, "any_rank": block.by_any_rank, **block.columns}
                flat = {c: v.reshape(-1) if isinstance(v, np.ndarray) else v for c, v in out.items()}
                write_table(pa.table({c: flat[c] for c in layout.names}, schema=layout))

            yield write

    @contextlib.contextmanager
    def _file(self, name: str, layout: Any, floats: Sequence[str] = ()) -> Iterator[Callable[[Any], None]]:
        digests = self.digests.setdefault(name, [])
        with (
            (self.folder / f"{name}.parquet").open("xb") as file,
            pq.ParquetWriter(
                file,
                layout,
                compression="zstd",
                compression_level=COMPRESSION_LEVEL,
                use_dictionary=[c for c in layout.names if c not in floats],
                use_byte_stream_split=list(floats),
                write_page_checksum=True,
            ) as writer,
        ):

            def write(table: Any) -> None:
                digests.append(_digest(table))
                writer.write_table(table, row_group_size=max(1, table.num_rows))

            yield write

    def _rows(self, name: str, kinds: Mapping[str, Any], rows: Iterator[tuple[Any, ...]]) -> None:
        """Write a small table of all ranks, of which a row group holds about as many rows or as much text."""
        layout = pa.schema(list(kinds.items()))
        with self._file(name, layout) as write:
            waiting: list[tuple[Any, ...]] = []
            size = 0

            def flush() -> None:
                columns = zip(*waiting, strict=True)
                write(
                    pa.table(
                        [pa.array(c, t) for c, t in zip(columns, layout.types, strict=True)], schema=layout
                    )
                )
                waiting.clear()

            for row in rows:
                waiting.append(row)
                size += sum(len(value) for value in row if isinstance(value, str))
                if len(waiting) >= MIN_GROUP_ROWS or size > MAX_TABLE_BYTES:
                    flush()
                    size = 0
            if waiting:
                flush()

    def _lists(self) -> None:
        files = [(rank, f) for rank, mine in self.ranks.items() for f in mine]
        for rank, file in files:
            self.rows[rank]["event"] += file.last["event"]
            self.rows[rank]["finding"] += file.last["finding"]
        events = (
            (rank, None if row[0] is None else row[0] + f.step_offset, *row[1:])
            for rank, f in files
            for row in f.event_rows
        )
        kinds = {"rank": pa.int64(), "step": pa.int64(), "time": pa.float64()}
        self._rows("events", kinds | {"kind": pa.string(), "payload": pa.string()}, events)
        findings = ((rank, text) for rank, f in files for (text,) in f.finding_rows)
        self._rows("findings", {"rank": pa.int64(), "json": pa.string()}, findings)

    def _tables(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Write the parameter tables; return, of each rank, ids and positions of their lists of names."""
        out: dict[int, tuple[tuple[int, int], ...]] = {}

        def rows() -> Iterator[tuple[Any, ...]]:
            for rank, mine in self.ranks.items():
                tables = {i: table for f in mine for i, table in f.tables.items()}
                named = {i: names for f in mine for i, names in f.table_names.items()}
                out[rank] = tuple((i, self._listed(names)) for i, names in named.items())
                self.rows[rank]["parameter_table"] = len(tables)
                yield from ((rank, i, codec.encode_row(table)) for i, table in tables.items())

        self._rows("tables", {"rank": pa.int64(), "id": pa.int64(), "json": pa.string()}, rows())
        return out

    def _scalars(self) -> dict[int, tuple[tuple[str, str], ...]]:
        """Write the scalars; return the sources and names of each rank, in the order of their first use."""
        text = pa.dictionary(pa.int32(), pa.string())
        layout = pa.schema(
            [
                ("rank", pa.int64()),
                ("source", text),
                ("name", text),
                ("step", pa.int64()),
                ("value", pa.float64()),
            ]
        )
        named: dict[int, tuple[tuple[str, str], ...]] = {}
        waiting: list[Any] = []
        with self._file("scalars", layout, ("value",)) as write:

            def flush() -> None:
                rows = pa.concat_tables(waiting).unify_dictionaries().combine_chunks()
                for first in range(0, rows.num_rows, MAX_GROUP_ROWS):
                    write(rows.slice(first, MAX_GROUP_ROWS))
                waiting.clear()

            for rank, mine in self.ranks.items():
                logged: dict[tuple[str, str], list[Logged]] = {}
                for f in mine:
                    by_id = f.scalars()
                    for i, source, name in f.scalar_names:
                        logged.setdefault((source, name), []).append(by_id.get(i, NOTHING))
                for (source, name), parts in logged.items():
                    steps, values = latest(parts)
                    N = len(steps)
                    self.rows[rank]["scalar"] += N
                    texts = [
                        pa.DictionaryArray.from_arrays(np.zeros(N, np.int32), pa.array([t], pa.string()))
                        for t in (source, name)
                    ]
                    waiting.append(pa.table([np.full(N, rank), *texts, steps, values], schema=layout))
                named[rank] = tuple(logged)
                self.rows[rank]["scalar_name"] = len(logged)
                if sum(t.num_rows for t in waiting) >= MIN_GROUP_ROWS:
                    flush()
            if waiting:
                flush()
        return named

    def _listed(self, names: tuple[str, ...]) -> int:
        if names not in self.names:
            self.names.append(names)
        return self.names.index(names)

    def _verify(self) -> None:
        """Read every row group again, and compare it with what was written."""
        ColumnarDataset(self.folder)
        for name, digests in self.digests.items():
            path = self.folder / f"{name}.parquet"
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                read_back = [_digest(file.read_row_group(i)) for i in range(file.num_row_groups)]
            if read_back != digests:
                raise RunFormatError(f"{path.name}: what was written is not what was read")


def _digest(table: Any) -> int:
    """Return the CRC-32 of all values, bit by bit."""
    crc = zlib.crc32(str(table.num_rows).encode())
    for column in table.columns:
        values = column.combine_chunks()
        for chunk in getattr(values, "chunks", [values]):  # one, except where dictionaries differ
            if hasattr(chunk, "dictionary"):
                texts = [zlib.crc32(str(text).encode()) for text in chunk.dictionary.to_pylist()]
                crc = zlib.crc32(np.array(texts, np.uint32)[chunk.indices.to_numpy()].tobytes(), crc)
            elif chunk.null_count or str(chunk.type) == "string":
                crc = zlib.crc32(repr(chunk.to_pylist()).encode(), crc)
            else:
                crc = zlib.crc32(np.ascontiguousarray(chunk.to_numpy(zero_copy_only=False)).tobytes(), crc)
    return crc


def _parts(files: Sequence[RankFile], series: str) -> list[int]:
    return sorted({part for file in files for part in file.parts(series)})


def _windows(steps: Steps, P: int) -> list[Window]:
    """Return windows of steps whose rows make up at most a row group."""
    size = max(1, MAX_GROUP_ROWS // max(P, 1))
    chunks = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in chunks]


def _only(block: Block, steps: Steps) -> Block:
    """Return the rows of a block at ``steps``."""
    at = np.isin(block.steps, steps)
    if at.all():
        return block
    columns = {name: values[at] for name, values in block.columns.items()}
    any_rank = None if block.any_rank is None else block.any_rank[at]
    return Block(block.steps[at], columns, block.measured[at], any_rank)
