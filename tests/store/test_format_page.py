"""The format page names everything that a run directory can hold."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from backlight.series import HISTOGRAM, SERIES
from backlight.store.export import ENDINGS
from backlight.store.filesystem import ProcessIdentity
from backlight.store.format import row_codec
from backlight.store.format.manifest import AttemptEntry, ListedSummary, Manifest, Progress
from backlight.store.format.schema import ARRAY_ENCODINGS, FORMAT_VERSION, SCALARS, TABLES
from backlight.store.read.columnar import Index, RankIndex
from backlight.store.read.run import open_run
from backlight.store.tables import long_table, scalars_table
from backlight.store.write.database import PAGE_BYTES
from backlight.store.write.writer import RunWriter

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"[\w./]+", PAGE))


def missing(names: object) -> list[str]:
    assert isinstance(names, (list, tuple, set, dict))
    return [n for n in names if n not in WORDS and f".{n}" not in WORDS and f"progress.{n}" not in WORDS]


def test_page_describes_the_current_format_version() -> None:
    assert f"This page describes format {FORMAT_VERSION}." in PAGE
    assert f"page size {PAGE_BYTES // 1024} KiB" in PAGE


@pytest.mark.parametrize(
    "record", [Manifest, AttemptEntry, Progress, ListedSummary, ProcessIdentity, Index, RankIndex]
)
def test_page_lists_every_manifest_field(record: type) -> None:
    assert missing([field.name for field in dataclasses.fields(record)]) == []


def test_page_lists_every_table_and_column() -> None:
    assert missing(list(TABLES)) == []
    for statement in TABLES.values():
        columns = re.findall(r"[(,] ?(\w+) (?:INTEGER|TEXT|REAL|BLOB)", statement)
        assert columns
        assert missing(columns) == []


def test_page_lists_every_series_and_column() -> None:
    for schema in SERIES.values():
        stored = [c.name for c in schema.columns if schema is not HISTOGRAM or not c.name.startswith("b")]
        assert missing([schema.name, *stored, *(d.name for d in schema.derived)]) == []
    assert {"b00", "b63"} <= WORDS


def test_page_lists_every_scalar() -> None:
    assert [n for n in SCALARS if n not in WORDS and not any(w.startswith(f"{n}/") for w in WORDS)] == []


def test_page_lists_every_letter_and_encoding() -> None:
    assert missing([*row_codec._WIDTHS, "c", "n", *ARRAY_ENCODINGS]) == []


def test_page_lists_every_export(tmp_path: Path) -> None:
    assert missing([f"out{ending}" for ending in ENDINGS]) == []
    RunWriter.create(tmp_path / "run").close()
    run = open_run(tmp_path / "run")
    assert missing([*long_table(run).names, *scalars_table(run).names]) == []
