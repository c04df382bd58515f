"""SQL over a stored run: its tables as views of an in-memory DuckDB without external access. No torch.

A view is read when a statement scans it, and only the columns that it needs.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

from backlight.answer import Answer, Column, Table, word
from backlight.findings.evaluate import findings_of
from backlight.store.export import (
    TABLE_ENDINGS,
    check_target,
    publish_files,
    record_batches,
    schema_of,
    write_parquet,
    write_rows,
)
from backlight.store.read.run import Run
from backlight.store.tables import StoredTable, tables_of
from backlight.text import visible

_CONFIGURATION: dict[str, str | bool | int | float | list[str]] = {
    # SQL may neither read nor write files, load code, nor access variables of this process.
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}


class QueryError(ValueError):
    """A statement that cannot be answered; the message lists the known names."""


@dataclass(frozen=True)
class QueryResult:
    """The rows of a statement: names of columns, and an Arrow reader that can be read once."""

    names: tuple[str, ...]
    reader: Any

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows as tuples; None where there is no value."""
        for batch in self.reader:
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                # Sums of whole numbers come as decimals of 38 digits.
                yield tuple(_plain(cell) if isinstance(cell, Decimal) else cell for cell in row)

    def answer(self, most: int) -> Answer:
        """Return the first ``most`` rows as a table; a terminal lists them where it is too narrow for it."""
        rows = list(itertools.islice(self.rows(), most + 1))
        numbers = [
            all(isinstance(cell, int | float | None) for cell in column) for column in zip(*rows, strict=True)
        ]
        columns = tuple(
            Column(name, itemgetter(n), _shown, "number" if is_number else "text")
            for n, (name, is_number) in enumerate(zip(self.names, numbers, strict=False))
        )
        more = f"the first {most} rows; --rows N shows more, --out FILE writes all of them"
        table = Table(columns, rows[:most], most, (more,) if len(rows) > most else (), listed=True)
        named = ", ".join(self.names)
        return Answer("" if rows else f"no rows of {named}", rows, tables=(table,) if rows else ())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        # Times since 1970 are of this size: six digits of one say nothing.
        return f"{value:.13g}" if 1e6 <= abs(value) < 1e12 else f"{value:.6g}"
    return str(value)


def _plain(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def tables(run: Run) -> dict[str, StoredTable]:
    """Return the tables by name; findings are evaluated now."""
    return tables_of(run, lambda: findings_of(run))


def tables_answer(run: Run) -> Answer:
    """Return the columns of each table with their types, units and meanings."""
    listed = tables(run).values()
    return Answer(
        "",
        [{"table": t.name, "meaning": t.meaning, "columns": t.columns} for t in listed],
        tables=tuple(
            Table(
                (
                    word(t.name, "name"), word("type", "kind"), word("unit", "unit"),
                    word("meaning", "meaning", "text"),
                ),
                t.columns, len(t.columns), (t.meaning,),
            )
            for t in listed
        ),
    )  # fmt: skip


@contextlib.contextmanager
def query(run: Run, statement: str) -> Iterator[QueryResult]:
    """Run one SELECT over the tables of a run; the result can be read inside the ``with``.

    Anything else, and what DuckDB refuses (an unknown table or column, wrong SQL), is a :class:`QueryError`.
    """
    import duckdb  # noqa: PLC0415 - an optional library

    by_name = tables(run)
    connection = duckdb.connect(":memory:", config=_CONFIGURATION)
    try:
        for table in by_name.values():
            connection.register(table.name, _view(table))
        connection.execute("SET lock_configuration = true")
        yield _execute(duckdb, connection, statement, by_name)
    finally:
        connection.close()


def _execute(duckdb: Any, connection: Any, statement: str, by_name: Mapping[str, StoredTable]) -> QueryResult:
    try:
        statements = connection.extract_statements(statement)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError(
                f"expected one SELECT over: {', '.join(by_name)}; nothing else can be done to a run"
            )
        relation = connection.sql(statement)
        # Renamed in DuckDB 1.5.
        read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
        reader = read(100_000)
        return QueryResult(tuple(reader.schema.names), reader)
    except duckdb.Error as error:
        raise QueryError(_explain(str(error), statement, by_name)) from None


def _explain(message: str, statement: str, by_name: Mapping[str, StoredTable]) -> str:
    """Return one line: the message of DuckDB, and the known names."""
    first = message.strip().splitlines()[0].strip()
    if "column" in first.casefold() or "Binder Error" in first:
        asked = [table for name, table in by_name.items() if name in statement.casefold()] or list(
            by_name.values()
        )
        there = "; ".join(f"{table.name} has {', '.join(table.names)}" for table in asked)
    else:
        there = f"tables: {', '.join(by_name)}"
    return f"{first} - {there}"


@dataclass(frozen=True)
class _Scan:
    """One scan of a view, read as DuckDB asks for rows.

    An Arrow scanner reads ahead in its own threads, also after a statement with a LIMIT is done: they would
    still run Python when the interpreter ends, which aborts the process.
    """

    table: StoredTable
    wanted: set[str]
    columns: list[str]
    filter: Any

    def to_reader(self) -> Any:
        """Return the reader of the batches."""
        import pyarrow as pa  # noqa: PLC0415 - an optional library

        whole = schema_of(self.table, self.wanted)
        schema = pa.schema([whole.field(name) for name in self.columns])
        return pa.RecordBatchReader.from_batches(schema, self._kept())

    def _kept(self) -> Iterator[Any]:
        import pyarrow as pa  # noqa: PLC0415 - an optional library

        for batch in record_batches(self.table, self.wanted):
            rows = pa.Table.from_batches([batch])
            if self.filter is not None:
                rows = rows.filter(self.filter)
            yield from rows.select(self.columns).to_batches()


def _view(table: StoredTable) -> Any:
    """Return an object that DuckDB treats as an Arrow dataset; it passes columns and filter of each scan."""
    import pyarrow.dataset as ds  # noqa: PLC0415 - an optional library

    class View(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
        def __init__(self) -> None:  # the base class only provides the type
            pass

        @property
        def schema(self) -> Any:
            return schema_of(table)

        def scanner(self, columns: Any = None, filter: Any = None, **_more: Any) -> Any:
            chosen = list(table.names if columns is None else columns)
            # A name that is in the filter by chance costs one column, nothing else.
            wanted = {n for n in table.names if n in chosen or (filter is not None and n in str(filter))}
            return _Scan(table, wanted, chosen, filter)

    return View()


def write(result: QueryResult, target: Path, *, overwrite: bool = False, raw: bool = False) -> Path:
    """Write a result to a ``.parquet`` or ``.csv`` file and return its path, or raise an ``ExportError``.

    ``raw`` is as for :func:`print_csv`.
    """
    check_target(target, TABLE_ENDINGS, "use .parquet or .csv")
    is_csv = target.suffix.lower() == ".csv"
    parquet = partial(write_parquet, schema=result.reader.schema, batches=result.reader)
    writer = partial(_write_csv, result, raw=raw) if is_csv else parquet
    publish_files({target: writer}, overwrite=overwrite)
    return target


def _write_csv(result: QueryResult, path: Path, *, raw: bool) -> None:
    with path.open("x", encoding="utf-8", newline="") as file:
        print_csv(result, file, raw=raw)


def print_csv(result: QueryResult, file: TextIO = sys.stdout, *, raw: bool = False) -> None:
    """Write a result as CSV; a missing value is an empty field, a measured NaN is ``nan``.

    A text that a spreadsheet would take for a formula gets a quote in front, and on a terminal control
    characters become escapes; with ``raw`` every text stays as it is.
    """
    rows = ([visible(cell) if isinstance(cell, str) else cell for cell in row] for row in result.rows())
    write_rows(file, [result.names], raw=raw)
    write_rows(file, rows if file.isatty() and not raw else result.rows(), raw=raw)
