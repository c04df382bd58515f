"""Tables and columns of a run as frames of pandas and polars.

What was not measured is null; NaN is a NaN that was measured. pandas keeps the two apart in columns of Arrow
types, polars always does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from backlight.store.export.arrow import to_arrow
from backlight.store.export.tables import tables_of
from backlight.store.format.names import storable

if TYPE_CHECKING:
    from backlight.store.read.frames import Frame
    from backlight.store.read.run import Run


def table_of(run: Run, name: str, columns: Collection[str] | None) -> Any:
    """Return a table of a run in Arrow's form.

    Raises
    ------
    KeyError
        If the run has no such table, or the table no such column.
    """
    tables = tables_of(run)
    if name not in tables:
        raise KeyError(f"{run.path} has no table {name!r}; it has {', '.join(tables)}")
    unknown = [column for column in columns or () if column not in tables[name].names]
    if unknown:
        raise KeyError(f"table {name!r} has no column {unknown[0]!r}; it has {', '.join(tables[name].names)}")
    return to_arrow(tables[name], columns)


def frame_table(frame: Frame, *, wide: bool) -> Any:
    """Return a column of a series: per step a row with each parameter, or a row per step and parameter."""
    import numpy as np  # noqa: PLC0415 - beside the other
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    names = [storable(name) for name in frame.names]
    S, P = frame.values.shape
    about = {"unit": frame.unit}
    if not wide:
        values = pa.array(frame.values.reshape(-1), mask=~frame.measured.reshape(-1), from_pandas=False)
        fields = [pa.field("step", pa.int64()), pa.field("parameter", pa.string())]
        steps, tiled = np.repeat(frame.steps, P), pa.array(names * S, pa.string())
        schema = pa.schema([*fields, pa.field("value", values.type, metadata=about)])
        return pa.table([pa.array(steps), tiled, values], schema=schema)
    columns = [
        pa.array(np.ascontiguousarray(frame.values[:, p]), mask=~frame.measured[:, p], from_pandas=False)
        for p in range(P)
    ]
    fields = [pa.field(n, c.type, metadata=about) for n, c in zip(names, columns, strict=True)]
    schema = pa.schema([pa.field("step", pa.int64()), *fields])
    return pa.table([pa.array(frame.steps), *columns], schema=schema)


def as_pandas(table: Any, index: str | None = None) -> Any:
    """Return an Arrow table as ``pandas.DataFrame``; ``attrs["units"]`` holds the units of its columns."""
    import pandas as pd  # noqa: PLC0415 - an optional library

    units = {f.name: (f.metadata or {}).get(b"unit", b"").decode() for f in table.schema}
    frame = table.replace_schema_metadata(None).to_pandas(types_mapper=pd.ArrowDtype)
    frame = frame if index is None else frame.set_index(index)
    frame.attrs["units"] = {name: unit for name, unit in units.items() if unit}
    return frame


def as_polars(table: Any) -> Any:
    """Return an Arrow table as ``polars.DataFrame``."""
    import polars as pl  # noqa: PLC0415 - an optional library

    return pl.from_arrow(table)
