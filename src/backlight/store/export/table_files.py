"""The tables of a run as files: one of them, or each beside the others. CSV and Parquet.

What was not measured is an empty field or a null; a NaN that was measured is ``nan``.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from backlight.records import Finding
from backlight.store.errors import ExportError
from backlight.store.export.arrow import batches, schema_of
from backlight.store.export.files import fields
from backlight.store.export.tables import Table, tables_of
from backlight.store.platform import atomic_json
from backlight.store.read.run import Run


def export_tables(
    run: Run,
    target: Path,
    name: str | None = None,
    *,
    findings: Callable[[], Sequence[Finding]] | None = None,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Write one table of a run to ``target``, or without a name all, each to ``NAME.<table>.<ending>``.

    Parameters
    ----------
    run, target
        The stored run, and a file that ends in ``.csv`` or ``.parquet``.
    name
        A name of :func:`backlight.store.export.tables.tables_of`.
    findings
        Gives the findings; without it those that were stored.
    overwrite
        Whether files that are there may be replaced.

    Raises
    ------
    ExportError
        If the ending or the table is not known, a file is there already, the folder or a library is missing.
    """
    ending = target.suffix.lower()
    if ending not in {".csv", ".parquet"}:
        raise ExportError(f"{target}: the ending {target.suffix!r} is not known; tables are .csv or .parquet")
    if ending == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ExportError(
            f"{target}: Parquet needs pyarrow, which is not installed: pip install 'backlight[parquet]'"
        )
    tables = tables_of(run, findings)
    if name is not None and name not in tables:
        raise ExportError(f"{run.path}: holds no table {name!r}; it has {', '.join(tables)}")
    if not target.parent.is_dir():
        raise ExportError(f"{target}: the folder {target.parent} is not there; create it first")
    if name is not None:
        made = {target: tables[name]}
    else:
        made = {target.with_name(f"{target.stem}.{t.name}{target.suffix}"): t for t in tables.values()}
    for path in made:
        if path.exists() and not overwrite:
            raise ExportError(f"{path}: is there already; choose another name, or overwrite it (--overwrite)")
    for path, table in made.items():
        temporary = atomic_json.temporary_name(path)
        try:
            (_csv if ending == ".csv" else _parquet)(temporary, table)
            atomic_json.sync_file(temporary)
            atomic_json.publish(temporary, path)
        except OSError as error:
            raise ExportError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return tuple(made)


def _csv(path: Path, table: Table) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table.names)
        for chunk in table.chunks(table.names):
            columns = [fields(chunk.columns[name], chunk.void[name]) for name in table.names]
            writer.writerows(zip(*columns, strict=True))


def _parquet(path: Path, table: Table) -> None:
    import pyarrow.parquet as pq  # noqa: PLC0415 - an optional library

    with pq.ParquetWriter(path, schema_of(table)) as writer:
        for batch in batches(table, table.names):
            writer.write_batch(batch)
