"""A Parquet file of a run, read by column and row group; pages are checked against their checksums.

pyarrow decodes columns and row groups in parallel. Every error is a :class:`RunFormatError` of one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.errors import RunFormatError

MAX_GROUP_ROWS = 16_000_000
"""Rows of a row group that is read: a damaged one could claim any number."""

MAX_ROWS_PER_BYTE = 1000
"""Rows per byte of a file: nothing that is recorded compresses that far."""

FREE_ROWS = 1_000_000
"""Rows of a file of any size."""


class ParquetFile:
    """One file, opened; ``path`` is for messages where ``source`` is an open file."""

    def __init__(self, path: Path, size: int, source: Any = None) -> None:
        self.path = path
        try:
            import pyarrow.parquet as pq  # noqa: PLC0415 - an optional library
        except ImportError:
            raise RunFormatError(
                f"{path}: reading a compacted run needs pyarrow, which is not installed: "
                "pip install 'backlight[parquet]'"
            ) from None
        with self._reading():
            self._file: Any = pq.ParquetFile(
                path if source is None else source, page_checksum_verification=True, pre_buffer=True
            )
            footer: Any = self._file.metadata
            self._groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
            rows = [group.num_rows for group in self._groups]
            if min(rows, default=0) < 0 or max(rows, default=0) > MAX_GROUP_ROWS:
                raise ValueError(f"a row group claims {max(rows, key=abs)} rows")
            if sum(rows) > max(FREE_ROWS, MAX_ROWS_PER_BYTE * size):
                raise ValueError(f"{size} bytes claim {sum(rows)} rows")
        self._bounds: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}

    def groups(self, **between: tuple[Any, Any]) -> list[int]:
        """Return the row groups that may hold rows with columns ``between`` two values, both included."""
        if not self._groups:
            return []  # extremes of nothing have no type that could be compared
        kept = np.ones(len(self._groups), dtype=bool)
        for column, (low, high) in between.items():
            least, most = self._extremes(column)
            kept &= (least <= high) & (most >= low)
        return [int(i) for i in np.flatnonzero(kept)]

    def read(self, columns: Sequence[str], groups: Sequence[int] | None = None) -> Any:
        """Return columns of the chosen row groups, or of all, as ``pyarrow.Table``."""
        chosen = range(len(self._groups)) if groups is None else groups
        with self._reading():
            missing = [c for c in columns if c not in self._file.schema_arrow.names]
            if missing:
                raise ValueError(f"it has no column {missing[0]!r}")
            return self._file.read_row_groups(list(chosen), columns=list(columns))

    def numbers(self, table: Any, column: str, kind: str) -> npt.NDArray[Any]:
        """Return a column as numbers of a dtype, or refuse another type and missing values."""
        with self._reading():
            found = table[column]
            if found.null_count or found.type.to_pandas_dtype() is not np.dtype(kind).type:
                raise ValueError(f"column {column!r} is {found.type} with {found.null_count} missing values")
            values: npt.NDArray[Any] = found.to_numpy()
        return values

    def damaged(self, problem: object) -> RunFormatError:
        """Return the error of a file whose content is not what it must be."""
        reason = str(problem).strip().partition("\n")[0]
        return RunFormatError(f"{self.path}: is damaged: {reason}; restore it from a copy of the run")

    def _extremes(self, column: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the smallest and largest value of a column in each row group."""
        if column not in self._bounds:
            with self._reading():
                at = self._file.schema_arrow.names.index(column)
                found = [group.column(at).statistics for group in self._groups]
                if not all(one is not None and one.has_min_max for one in found):
                    raise ValueError(f"column {column!r} has no statistics")
                self._bounds[column] = np.array([s.min for s in found]), np.array([s.max for s in found])
        return self._bounds[column]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        import pyarrow as pa  # noqa: PLC0415 - an optional library

        try:
            yield
        except (pa.ArrowException, OSError, ValueError, TypeError, MemoryError, OverflowError) as error:
            raise self.damaged(error) from error
