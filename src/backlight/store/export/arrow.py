"""Tables of a run in Arrow's form, for DuckDB, pandas and polars; units stand in the schema."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from backlight.store.export.tables import FLOAT, INTEGER, TEXT, TRUTH, Table


def schema_of(table: Table, wanted: Collection[str] | None = None) -> Any:
    """Return the Arrow schema of a table or of some of its columns, each with its ``unit`` as metadata."""
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    kinds = {INTEGER: pa.int64(), FLOAT: pa.float64(), TRUTH: pa.bool_(), TEXT: pa.string()}
    return pa.schema(
        [
            pa.field(c.name, kinds[c.kind], metadata={"unit": c.unit, "meaning": c.meaning})
            for c in table.columns
            if wanted is None or c.name in wanted
        ]
    )


def batches(table: Table, wanted: Collection[str]) -> Iterator[Any]:
    """Yield the wanted columns of a table as record batches; what is void is null."""
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    schema = schema_of(table, wanted)
    for chunk in table.chunks(wanted):
        arrays = [
            pa.array(chunk.columns[f.name], type=f.type, mask=chunk.void[f.name], from_pandas=False)
            for f in schema
        ]
        yield pa.record_batch(arrays, schema=schema)


def to_arrow(table: Table, wanted: Collection[str] | None = None) -> Any:
    """Return a table, or some of its columns, in memory as ``pyarrow.Table``."""
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    chosen = set(table.names if wanted is None else wanted)
    return pa.Table.from_batches(batches(table, chosen), schema=schema_of(table, chosen))
