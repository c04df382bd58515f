"""A run for other tools: files, archives of files, and tables in memory (Arrow, pandas, polars).

Files are CSV, Parquet or HDF5, by the ending of the target.

``.csv`` and ``.parquet`` hold one table each: by default a long table with a row per attempt, step and
parameter, and next to it ``NAME.scalars.csv`` (or ``.parquet``); for a run that holds only spectra their
table; on request any table of :func:`backlight.store.tables.tables_of`. ``.h5`` holds an array
``[steps, parameters]`` per column of each series, and every stored array over its steps. What was not
measured is null, an empty field or NaN with ``measured`` 0; it is never a number. Units are metadata of
Arrow's fields, and ``attrs["units"]`` of a pandas frame, whose columns of Arrow types keep null
and NaN distinct.
"""

from __future__ import annotations

import contextlib
import csv
import io
import tarfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from backlight import atomic_files
from backlight.extras import require
from backlight.records import Finding
from backlight.series import SERIES
from backlight.store.errors import ExportError
from backlight.store.format.arrays import Filters, h5py_module
from backlight.store.format.names import storable
from backlight.store.read.run import Frame, Run
from backlight.store.spectra import LAYER
from backlight.store.tables import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    TEXT,
    StoredTable,
    long_table,
    scalars_table,
    spectra_table,
    tables_of,
)

TABLE_ENDINGS = (".csv", ".parquet")
ENDINGS = (*TABLE_ENDINGS, ".h5")

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which a spreadsheet takes a cell for a formula, or for one after a separator."""


def export(
    run: Run,
    target: str | Path,
    table: str | None = None,
    *,
    findings: Callable[[], Sequence[Finding]] | None = None,
    max_directions: int | None = None,
    overwrite: bool = False,
    raw: bool = False,
) -> tuple[Path, ...]:
    """Write ``run`` to ``target``, which ends in ``.csv``, ``.parquet`` or ``.h5``, and return the files.

    ``table`` is ``parameters``, the long table with the scalars in a file next to it; ``spectra``; the name
    of another table, of which ``parameter-table`` lists the parameters; or ``all``, each in
    ``NAME.<table>.<ending>``. By default it is that of what the run holds. In CSV a text that a spreadsheet
    would take for a formula gets a quote in front, unless ``raw``.

    Raises
    ------
    ExportError
        If the target, the table or ``max_directions`` cannot be used.
    """
    target = Path(target)
    check_target(target, ENDINGS, f"use one of {', '.join(ENDINGS)}")
    if target.suffix.lower() == ".h5":
        if table is not None or max_directions is not None:
            raise ExportError(
                f"{target}: .h5 holds every series and array; --table and --max-directions are for tables"
            )
        return publish_files({target: lambda path: _write_h5(run, path)}, overwrite=overwrite)
    if table is None:
        table = "spectra" if run.events(LAYER) and not run.has("gradient") else "parameters"
    if max_directions is not None and table != "spectra":
        raise ExportError("--max-directions is for the rows of spectra; add --table spectra")
    tables = {} if table in {"parameters", "spectra"} else tables_of(run, findings)
    name = "parameters" if table == "parameter-table" else table
    if table == "parameters":
        chosen = {"": long_table(run), "scalars": scalars_table(run)}
    elif table == "spectra":
        chosen = {"": spectra_table(run, max_directions)}
    elif table == "all":
        chosen = tables
    elif name in tables:
        chosen = {"": tables[name]}
    else:
        raise ExportError(f"{run.path}: holds no table {table!r}; it has {', '.join(tables)}")
    paths = {
        target.with_name(f"{target.stem}.{part}{target.suffix}") if part else target: stored
        for part, stored in chosen.items()
    }
    return publish_files(_writers(paths, raw=raw), overwrite=overwrite)


def write_arrays(
    target: Path, arrays: Mapping[str, tuple[npt.ArrayLike, Sequence[str], str]], *, overwrite: bool = False
) -> Path:
    """Write values with the names of their axes and their unit, by name, to an HDF5 file, and return it."""
    check_target(target, (".h5",), "use .h5")

    def write(path: Path) -> None:
        with h5py_module().File(path, "x", locking=False) as file:
            for name, (values, dims, unit) in arrays.items():
                dataset = file.create_dataset(_hdf5_text(name), data=np.asarray(values))
                dataset.attrs["dims"], dataset.attrs["unit"] = list(dims), unit

    return publish_files({target: write}, overwrite=overwrite)[0]


def check_target(target: Path, endings: Sequence[str], fix: str) -> None:
    """Refuse a target with another ending, without its library, or in a folder that does not exist."""
    ending = target.suffix.lower()
    if ending not in endings:
        raise ExportError(f"{target}: the ending {target.suffix!r} is not known; {fix}")
    package = {".parquet": "pyarrow", ".h5": "h5py"}.get(ending)
    if package is not None:
        require(package, what=str(target))
    if not target.parent.is_dir():
        raise ExportError(f"{target}: the folder {target.parent} does not exist; create it first")


def _writers(tables: Mapping[Path, StoredTable], *, raw: bool) -> dict[Path, Callable[[Path], None]]:
    def writer(path: Path, table: StoredTable) -> Callable[[Path], None]:
        if path.suffix.lower() == ".csv":
            return lambda temporary: _write_csv(temporary, table, raw=raw)
        return lambda temporary: write_parquet(
            temporary, schema_of(table), record_batches(table, table.names)
        )

    return {path: writer(path, table) for path, table in tables.items()}


def publish_files(files: Mapping[Path, Callable[[Path], None]], *, overwrite: bool) -> tuple[Path, ...]:
    """Write all files under temporary names, then give each its own."""
    for path in files:
        if path.exists() and not overwrite:
            raise ExportError(f"{path}: exists already; choose another name, or overwrite it (--overwrite)")
    try:
        with contextlib.ExitStack() as stack:
            for path, write in files.items():
                write(stack.enter_context(atomic_files.replacing(path)))
    except OSError as error:
        first = next(iter(files))
        raise ExportError(f"{first}: cannot be written: {error.strerror or error}") from error
    return tuple(files)


def _write_csv(path: Path, table: StoredTable, *, raw: bool) -> None:
    with path.open("x", encoding="utf-8", newline="") as file:
        write_rows(file, [table.names], raw=raw)
        for chunk in table.chunks(table.names):
            rows = zip(*(_fields(chunk[name]) for name in table.names), strict=True)
            write_rows(file, rows, raw=raw)


def _fields(column: npt.NDArray[Any]) -> list[Any]:
    """Return the fields of a column: empty where there is no value, 0 and 1 for booleans."""
    values = np.ma.getdata(column)
    out: list[Any] = (values.astype(np.int64) if values.dtype == np.bool_ else values).tolist()
    for i in np.flatnonzero(np.ma.getmaskarray(column)).tolist():
        out[i] = ""
    return out


def write_parquet(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    """Write record batches of Arrow to a new Parquet file."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - an optional library

    with path.open("xb") as file, pq.ParquetWriter(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _write_h5(run: Run, target: Path) -> None:
    h5py = h5py_module()
    with h5py.File(target, "x", locking=False) as file:
        file.attrs["run_id"] = run.run_id
        names = [_hdf5_text(p.name) for p in run.parameters()]
        file.create_dataset("parameters", data=names, dtype=h5py.string_dtype())
        for series, schema in SERIES.items():
            if not run.has(series):
                continue
            group = file.create_group(series)
            for column in [c.name for c in schema.columns] + [d.name for d in schema.derived]:
                frame = run.frame(series, column)
                dataset = group.create_dataset(column, data=frame.values)
                dataset.attrs["unit"] = frame.unit
                dataset.attrs["dims"] = ["step", "parameter"]
            group.create_dataset("step", data=run.frame(series, "measured").steps)
        for source in ("backlight", "user"):
            for i, name in enumerate(run.scalar_names(source)):
                scalar = run.scalar(name, source)
                # A name may hold characters that an HDF5 path cannot; it is an attribute.
                group = file.create_group(f"scalars/{source}/{i}")
                group.attrs["name"], group.attrs["unit"] = _hdf5_text(name), scalar.unit
                group.create_dataset("step", data=scalar.steps)
                group.create_dataset("value", data=scalar.values)
        for i, name in enumerate(run.array_names()):
            _write_array(run, file, name, f"arrays/{i}")


def _write_array(run: Run, file: Any, name: str, path: str) -> None:
    """Write one array as ``[steps, ...]``, or as one dataset for each shape that it had."""
    steps, values = run.array(name)
    info = run.array_info(name)
    shapes = dict.fromkeys(value.shape for value in values)
    for j, shape in enumerate(shapes):
        group = file.create_group(path if len(shapes) == 1 else f"{path}/{j}")
        chosen = [k for k, value in enumerate(values) if value.shape == shape]
        stack = np.stack([values[k] for k in chosen])
        group.attrs["name"] = _hdf5_text(name)
        group.attrs["unit"], group.attrs["dims"] = info.unit, ["step", *info.dims]
        group.create_dataset("step", data=steps[chosen])
        group.create_dataset("value", data=stack, **Filters().options(stack.shape, stack.dtype.itemsize))


def _hdf5_text(text: str) -> str:
    return storable(text).replace("\0", "\\0")


def write_rows(file: TextIO, rows: Iterable[Iterable[Any]], *, raw: bool = False) -> None:
    """Write rows as CSV; a text that begins like a formula, and is no number, gets a quote in front.

    With ``raw`` every text stays as it is.
    """
    writer = csv.writer(file)
    writer.writerows(rows if raw else ([_neutral(value) for value in row] for row in rows))


def _neutral(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def to_pandas(
    data: Run | Frame | StoredTable,
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
    data: Run | Frame | StoredTable,
    table: str = "steps",
    columns: Collection[str] | None = None,
    *,
    wide: bool = True,
) -> Any:
    """Return the same as :func:`to_pandas` as ``polars.DataFrame``; it raises the same."""
    import polars as pl  # noqa: PLC0415 - an optional library

    return pl.from_arrow(_arrow(data, table, columns, wide=wide))


def to_arrow(table: StoredTable, wanted: Collection[str] | None = None) -> Any:
    """Return a table, or some of its columns, as ``pyarrow.Table``."""
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    chosen = set(table.names if wanted is None else wanted)
    unknown = sorted(chosen - set(table.names))
    if unknown:
        raise KeyError(f"table {table.name!r} has no column {unknown[0]!r}; it has {', '.join(table.names)}")
    return pa.Table.from_batches(record_batches(table, chosen), schema=schema_of(table, chosen))


def schema_of(table: StoredTable, wanted: Collection[str] | None = None) -> Any:
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


def record_batches(table: StoredTable, wanted: Collection[str]) -> Iterator[Any]:
    """Yield the wanted columns of a table as record batches; what is void is null."""
    import pyarrow as pa  # noqa: PLC0415 - an optional library

    schema = schema_of(table, wanted)
    for chunk in table.chunks(wanted):
        arrays = [
            _array(np.ma.getdata(chunk[f.name]), np.ma.getmaskarray(chunk[f.name]), f.type) for f in schema
        ]
        yield pa.record_batch(arrays, schema=schema)


def _arrow(
    data: Run | Frame | StoredTable, table: str, columns: Collection[str] | None, *, wide: bool
) -> Any:
    if isinstance(data, Frame):
        return _frame_to_arrow(data, wide=wide)
    if isinstance(data, StoredTable):
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


ARCHIVE_ENDINGS = (".tar.gz", ".tgz", ".zip")

Member = tuple[str, Path | bytes]
"""A path inside the archive, with the file or its content."""


def check_archive(target: Path, what: str = "--bundle") -> None:
    """Check the name of an archive before its content is made; ``what`` is the option that named it."""
    if not target.name.endswith(ARCHIVE_ENDINGS):
        raise ValueError(f"{what} {target}: expected a name that ends in {', '.join(ARCHIVE_ENDINGS)}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{what} {target}: no such folder: {target.absolute().parent}")
    if target.is_dir():
        raise ValueError(f"{what} {target}: is a folder; expected the name of a file")


def write_archive(target: Path, members: Iterable[Member]) -> Path:
    """Write ``members`` below one folder into ``target``, whole or not at all; an OSError passes through."""
    check_archive(target)
    root = target.name.removesuffix(next(e for e in ARCHIVE_ENDINGS if target.name.endswith(e))) or "bundle"
    with atomic_files.replacing(target) as temporary:
        if target.name.endswith(".zip"):
            with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
                for name, content in members:
                    if isinstance(content, Path):
                        archive.write(content, f"{root}/{name}")
                    else:
                        archive.writestr(f"{root}/{name}", content)
        else:
            with tarfile.open(temporary, "x:gz") as tar:
                for name, content in members:
                    if isinstance(content, Path):
                        tar.add(content, f"{root}/{name}", recursive=False)
                    else:
                        entry = tarfile.TarInfo(f"{root}/{name}")
                        entry.size, entry.mtime = len(content), int(time.time())
                        tar.addfile(entry, io.BytesIO(content))
    return target
