"""Tables and columns of a run in memory: Arrow, pandas and polars.

What was not measured is null; NaN is a NaN that was measured. pandas keeps the two apart in columns of Arrow
types, polars always does. Units are metadata of Arrow's fields, and ``attrs["units"]`` of a pandas frame.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from backlight.store.export.tables import BOOLEAN, FLOAT, INTEGER, TEXT, Table, tables_of
from backlight.store.format.names import storable
from backlight.store.read.run import Frame, Run


def to_pandas(
    data: Run | Frame | Table,
    table: str = "steps",
    columns: Collection[str] | None = None,
    *,
    wide: bool = True,
) -> Any:
    """Return a table of a run, or a column of a series, as ``pandas.DataFrame``.

    Parameters
    ----------
    data
        A run, one of its tables, or a frame of :meth:`~backlight.store.read.run.Run.frame`.
    table
        Of a run: ``steps`` has a column per scalar, ``gradient`` a row per step and parameter; ``scalars``,
        ``events``, ``findings`` (the stored ones), ``parameters`` and ``attempts`` are others.
    columns
        Columns of the table; by default all.
    wide
        Of a frame: a column per parameter over steps, else one row for each value.

    Raises
    ------
    KeyError
        If the run has no such table, or the table no such column.
    """
    import pandas as pd  # noqa: PLC0415 - an optional library

    arrow = _arrow(data, table, columns, wide=wide)
    units = {f.name: (f.metadata or {}).get(b"unit", b"").decode() for f in arrow.schema}
    frame = arrow.replace_schema_metadata(None).to_pandas(types_mapper=pd.ArrowDtype)
    frame = frame.set_index("step") if isinstance(data, Frame) and wide else frame
    frame.attrs["units"] = {name: unit for name, unit in units.items() if unit}
    return frame


def to_polars(
    data: Run | Frame | Table,
    table: str = "steps",
    columns: Collection[str] | None = None,
    *,
    wide: bool = True,
) -> Any:
    """Return the same as :func:`to_pandas` as ``polars.DataFrame``; it raises the same."""
    import polars as pl  # noqa: PLC0415 - an optional library

    return pl.from_arrow(_arrow(data, table, columns, wide=wide))


def to_arrow(table: Table, wanted: Collection[str] | None = None) -> Any:
    """Return a table, or some of its columns, as ``pyarrow.Table``."""
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    chosen = set(table.names if wanted is None else wanted)
    unknown = sorted(chosen - set(table.names))
    if unknown:
        raise KeyError(f"table {table.name!r} has no column {unknown[0]!r}; it has {', '.join(table.names)}")
    return pa.Table.from_batches(record_batches(table, chosen), schema=schema_of(table, chosen))


def schema_of(table: Table, wanted: Collection[str] | None = None) -> Any:
    """Return the Arrow schema of a table or of some of its columns, each with its ``unit`` as metadata."""
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    kinds = {INTEGER: pa.int64(), FLOAT: pa.float64(), BOOLEAN: pa.bool_(), TEXT: pa.string()}
    return pa.schema(
        [
            pa.field(c.name, kinds[c.kind], metadata={"unit": c.unit, "meaning": c.meaning})
            for c in table.columns
            if wanted is None or c.name in wanted
        ]
    )


def record_batches(table: Table, wanted: Collection[str]) -> Iterator[Any]:
    """Yield the wanted columns of a table as record batches; what is void is null."""
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    schema = schema_of(table, wanted)
    for chunk in table.chunks(wanted):
        arrays = [
            _array(np.ma.getdata(chunk[f.name]), np.ma.getmaskarray(chunk[f.name]), f.type) for f in schema
        ]
        yield pa.record_batch(arrays, schema=schema)


def _arrow(data: Run | Frame | Table, table: str, columns: Collection[str] | None, *, wide: bool) -> Any:
    if isinstance(data, Frame):
        return _frame_to_arrow(data, wide=wide)
    if isinstance(data, Table):
        return to_arrow(data, columns)
    tables = tables_of(data)
    if table not in tables:
        raise KeyError(f"{data.path} has no table {table!r}; it has {', '.join(tables)}")
    return to_arrow(tables[table], columns)


def _frame_to_arrow(frame: Frame, *, wide: bool) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    names = [storable(name) for name in frame.names]
    S, P = frame.values.shape
    columns: dict[str, Any]
    if wide:
        steps = frame.steps
        columns = {n: _array(frame.values[:, p], ~frame.measured[:, p]) for p, n in enumerate(names)}
    else:
        steps = np.repeat(frame.steps, P)
        columns = {"parameter": pa.array(names * S, pa.string())}
        columns["value"] = _array(frame.values.reshape(-1), ~frame.measured.reshape(-1))
    units = {name: {"unit": frame.unit} for name in (columns if wide else ("value",))}
    fields = [pa.field(name, column.type, metadata=units.get(name)) for name, column in columns.items()]
    schema = pa.schema([pa.field("step", pa.int64()), *fields])
    return pa.table([pa.array(steps), *columns.values()], schema=schema)


def _array(values: Any, void: Any, kind: Any = None) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    return pa.array(np.ascontiguousarray(values), type=kind, mask=void, from_pandas=False)
