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
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backlight.store.format.schema import FORMAT_VERSION

INDEX = "index.json"
INDEX_KIND = "backlight columns"
JOINED = "-joined"

MAX_GROUP_ROWS = 1_000_000
"""Rows of a row group that is written."""


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
