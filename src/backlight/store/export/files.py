"""A run as files for other tools: CSV, Parquet or HDF5, chosen by the ending of the target.

``.csv`` and ``.parquet`` give a long table with one row per attempt, step and parameter, and beside it
``NAME.scalars.csv`` (or ``.parquet``) with one row per attempt, step and scalar; on request, and by default
for a run that holds nothing else, one table with one row per step, layer and direction of its spectra.
``.h5`` gives one file with an array ``[steps, parameters]`` per column of each series, and every stored
array over its steps. What was not measured is null, an empty field or NaN with ``measured`` 0; it is never a
number.
"""

from __future__ import annotations

import csv
import enum
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.errors import ExportError
from backlight.store.export.chunk import Chunk
from backlight.store.export.spectra_table import COLUMNS as SPECTRA_COLUMNS
from backlight.store.export.spectra_table import FLOATS as SPECTRA_FLOATS
from backlight.store.export.spectra_table import TEXTS as SPECTRA_TEXTS
from backlight.store.export.spectra_table import spectra_chunks
from backlight.store.format.hdf5_filters import Filters
from backlight.store.format.names import storable
from backlight.store.format.schema import SERIES
from backlight.store.format.spectra import LAYER as SPECTRA_LAYER
from backlight.store.platform import atomic_json
from backlight.store.read.run import Run

__all__ = ["ENDINGS", "ExportError", "Rows", "export"]

CHUNK_ROWS = 500_000
"""Rows of the long table that are in memory at a time."""

_FROM_SERIES: dict[str, tuple[str, str]] = {
    "norm": ("gradient", "norm"),
    "rms": ("gradient", "rms"),
    "mean": ("gradient", "mean"),
    "max_abs": ("gradient", "max_abs"),
    "zeros": ("gradient", "zeros"),
    "nan": ("gradient", "nan"),
    "inf": ("gradient", "inf"),
    "numel": ("gradient", "numel"),
    "update_norm": ("update", "update_norm"),
    "weight_norm": ("update", "weight_norm"),
    "update_ratio": ("update", "ratio"),
}

COLUMNS = ("step", "attempt", "parameter", "measured", *_FROM_SERIES)
"""Columns of the long table; ``measured`` is that of the gradient."""

SCALAR_COLUMNS = ("step", "attempt", "source", "name", "value", "unit")

_FLOATS = SPECTRA_FLOATS | {
    "value", "norm", "rms", "mean", "max_abs", "update_norm", "weight_norm", "update_ratio"
}  # fmt: skip
_TEXTS = SPECTRA_TEXTS | {"parameter", "source", "name", "unit"}


class Rows(enum.StrEnum):
    """What a row of an exported table is."""

    PARAMETERS = "parameters"
    SPECTRA = "spectra"


def export(
    run: Run,
    target: str | Path,
    *,
    overwrite: bool = False,
    rows: Rows | str | None = None,
    max_directions: int | None = None,
) -> tuple[Path, ...]:
    """Write ``run`` to ``target`` and return the files that were made.

    Parameters
    ----------
    run
        The stored run.
    target
        The file; its ending says in which form.
    overwrite
        Whether a file that is there may be replaced.
    rows
        What a row is: a parameter at a step, or a direction of a layer's spectra at a step. Without it
        directions for a run that holds spectra and no gradients, else parameters.
    max_directions
        Most directions of a layer at a step.

    Raises
    ------
    ExportError
        If the ending is not known, a file is there already, the folder is missing, a library is, or the
        rows that were asked for cannot be had.
    """
    target = Path(target)
    write = ENDINGS.get(target.suffix.lower())
    if write is None:
        known = ", ".join(ENDINGS)
        raise ExportError(f"{target}: the ending {target.suffix!r} is not known; use one of {known}")
    if target.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        msg = f"{target}: Parquet needs pyarrow, which is not installed: pip install 'backlight[parquet]'"
        raise ExportError(f"{msg}, or export to .csv or .h5")
    if not target.parent.is_dir():
        raise ExportError(f"{target}: the folder {target.parent} is not there; create it first")
    chosen = _chosen(run, target, rows, max_directions)
    made = (target, _beside(target)) if chosen is Rows.PARAMETERS and write is not _write_h5 else (target,)
    for path in made:
        if path.exists() and not overwrite:
            raise ExportError(f"{path}: is there already; choose another name, or overwrite it (--overwrite)")
    temporary = tuple(atomic_json.temporary_name(path) for path in made)
    try:
        if chosen is Rows.SPECTRA and write is not _write_h5:
            write_table = _csv if write is _write_csv else _parquet
            write_table(temporary[0], SPECTRA_COLUMNS, spectra_chunks(run, max_directions))
        else:
            write(run, *temporary)
        for source, path in zip(temporary, made, strict=True):
            atomic_json.sync_file(source)
            atomic_json.publish(source, path)
    except OSError as error:
        raise ExportError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        for source in temporary:
            source.unlink(missing_ok=True)
    return made


def _chosen(run: Run, target: Path, rows: Rows | str | None, max_directions: int | None) -> Rows:
    try:
        asked = None if rows is None else Rows(rows)
    except ValueError:
        raise ExportError(f"rows must be one of {', '.join(Rows)}, got {rows!r}") from None
    h5 = target.suffix.lower() == ".h5"
    if h5 and (asked is not None or max_directions is not None):
        raise ExportError(
            f"{target}: .h5 holds every series and array; --rows and --max-directions are of tables"
        )
    if asked is None:
        spectra_only = bool(run.events(SPECTRA_LAYER)) and not run.has("gradient")
        asked = Rows.SPECTRA if spectra_only else Rows.PARAMETERS
    if asked is Rows.PARAMETERS and max_directions is not None:
        raise ExportError("--max-directions is about the rows of spectra; add --rows spectra")
    return asked


def parameter_chunks(run: Run) -> Iterator[Chunk]:
    """Yield the long table of parameters, some steps at a time, by attempt, step and model order."""
    names = np.array([storable(p.name) for p in run.parameters()], dtype=object)
    P = len(names)
    for attempt in run.attempts:
        frames = {
            name: run.frame(series, column, attempt=attempt.index)
            for name, (series, column) in _FROM_SERIES.items()
        }
        steps = np.unique(np.concatenate([frame.steps for frame in frames.values()]))
        rows_each = max(1, CHUNK_ROWS // max(P, 1))
        for start in range(0, len(steps) if P else 0, rows_each):
            chosen = steps[start : start + rows_each]
            S = len(chosen)
            columns: dict[str, npt.NDArray[Any]] = {
                "step": np.repeat(chosen, P),
                "attempt": np.full(S * P, attempt.index, dtype=np.int64),
                "parameter": np.tile(names, S),
            }
            void = {name: np.zeros(S * P, dtype=bool) for name in (*columns, "measured")}
            for name, frame in frames.items():
                first, last = np.searchsorted(frame.steps, [chosen[0], chosen[-1] + 1])
                at = np.searchsorted(chosen, frame.steps[first:last])
                values = np.zeros((S, P), dtype=frame.values.dtype)
                measured = np.zeros((S, P), dtype=bool)
                values[at], measured[at] = frame.values[first:last], frame.measured[first:last]
                columns[name], void[name] = values.reshape(-1), ~measured.reshape(-1)
            columns["measured"] = ~void["norm"]
            yield Chunk({name: columns[name] for name in COLUMNS}, void)


def scalar_chunks(run: Run) -> Iterator[Chunk]:
    """Yield the long table of scalars, one scalar of one attempt at a time."""
    for attempt in run.attempts:
        for source in ("backlight", "user"):
            for name in run.scalar_names(source):
                scalar = run.scalar(name, source, attempt=attempt.index)
                S = len(scalar.steps)
                columns: dict[str, npt.NDArray[Any]] = {
                    "step": scalar.steps,
                    "attempt": np.full(S, attempt.index, dtype=np.int64),
                    "source": np.full(S, source, dtype=object),
                    "name": np.full(S, storable(name), dtype=object),
                    "value": scalar.values,
                    "unit": np.full(S, scalar.unit, dtype=object),
                }
                yield Chunk(columns, {column: np.zeros(S, dtype=bool) for column in columns})


def _beside(target: Path) -> Path:
    return target.with_name(f"{target.stem}.scalars{target.suffix}")


def _write_csv(run: Run, parameters: Path, scalars: Path) -> None:
    for path, names, chunks in _tables(run, parameters, scalars):
        _csv(path, names, chunks)


def _csv(path: Path, names: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for chunk in chunks:
            row = [fields(chunk.columns[name], chunk.void[name]) for name in names]
            writer.writerows(zip(*row, strict=True))


def fields(values: npt.NDArray[Any], void: npt.NDArray[np.bool_]) -> list[Any]:
    """Return the fields of a column of a CSV file: empty where there is no value, 0 and 1 for truth."""
    if values.dtype == np.bool_:
        values = values.astype(np.int64)
    out: list[Any] = values.tolist()
    for i in np.flatnonzero(void).tolist():
        out[i] = ""
    return out


def _write_parquet(run: Run, parameters: Path, scalars: Path) -> None:
    for path, names, chunks in _tables(run, parameters, scalars):
        _parquet(path, names, chunks)


def _parquet(path: Path, names: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
    import pyarrow as pa  # noqa: PLC0415 - an optional library
    import pyarrow.parquet as pq  # noqa: PLC0415 - an optional library

    def kind(name: str) -> Any:
        if name in _TEXTS:
            return pa.dictionary(pa.int32(), pa.string())
        return pa.bool_() if name == "measured" else pa.float64() if name in _FLOATS else pa.int64()

    schema = pa.schema([(name, kind(name)) for name in names])
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in chunks:
            columns = [
                pa.array(chunk.columns[name], mask=chunk.void[name], from_pandas=False).cast(kind(name))
                for name in names
            ]
            writer.write_table(pa.table(columns, schema=schema))


def _tables(
    run: Run, parameters: Path, scalars: Path
) -> tuple[tuple[Path, tuple[str, ...], Iterator[Chunk]], ...]:
    return (
        (parameters, COLUMNS, parameter_chunks(run)),
        (scalars, SCALAR_COLUMNS, scalar_chunks(run)),
    )


def _write_h5(run: Run, target: Path) -> None:
    import h5py  # noqa: PLC0415 - 0.1 s that other exports need not pay

    text = h5py.string_dtype()
    with h5py.File(target, "w", locking=False) as file:
        file.attrs["run_id"] = run.run_id
        names = [storable(p.name).replace("\0", "\\0") for p in run.parameters()]
        file.create_dataset("parameters", data=names, dtype=text)
        for series, schema in SERIES.items():
            if not run.has(series):
                continue
            group = file.create_group(series)
            columns = [c.name for c in schema.columns] + [d.name for d in schema.derived]
            for column in columns:
                frame = run.frame(series, column)
                dataset = group.create_dataset(column, data=frame.values)
                dataset.attrs["unit"] = frame.unit
                dataset.attrs["dims"] = ["step", "parameter"]
            group.create_dataset("step", data=run.frame(series, "measured").steps)
        for source in ("backlight", "user"):
            for i, name in enumerate(run.scalar_names(source)):
                scalar = run.scalar(name, source)
                # A name may hold what an HDF5 path cannot; it stands in an attribute.
                group = file.create_group(f"scalars/{source}/{i}")
                group.attrs["name"] = storable(name).replace("\0", "\\0")
                group.attrs["unit"] = scalar.unit
                group.create_dataset("step", data=scalar.steps)
                group.create_dataset("value", data=scalar.values)
        _write_arrays(run, file)


def _write_arrays(run: Run, file: Any) -> None:
    """Put each array below ``arrays/<number>`` as ``[steps, ...]``, or as one for each shape that it had."""
    for i, name in enumerate(run.array_names()):
        steps, values = run.array(name)
        info = run.array_info(name)
        shapes = dict.fromkeys(value.shape for value in values)
        for j, shape in enumerate(shapes):
            group = file.create_group(f"arrays/{i}" if len(shapes) == 1 else f"arrays/{i}/{j}")
            chosen = [k for k, value in enumerate(values) if value.shape == shape]
            stack = np.stack([values[k] for k in chosen])
            group.attrs["name"] = storable(name).replace("\0", "\\0")
            group.attrs["unit"], group.attrs["dims"] = info.unit, ["step", *info.dims]
            group.create_dataset("step", data=steps[chosen])
            group.create_dataset("value", data=stack, **Filters().options(stack.shape, stack.dtype.itemsize))


ENDINGS: dict[str, Callable[..., None]] = {".csv": _write_csv, ".parquet": _write_parquet, ".h5": _write_h5}
"""What is written for each ending."""
