"""A trace reopened from Parquet equals the original and is never stale."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from backlight.trace import cache
from backlight.trace.cache import cache_path, open_trace
from backlight.trace.events import Trace, TraceError
from synthetic_traces import TraceBuilder, rows_of


def made(path: Path, name: str = "aten::mm") -> Path:
    builder = TraceBuilder(rank=1)
    builder.step(1, 0, 100.5)
    builder.operator(name, 1, 2, **{"Input type": ["float"], "Call stack": "a.py(1): é"})
    builder.kernel("k", 5, 10.125, 20)
    return builder.write(path, baseTimeNanoseconds=17)


def same(one: Trace, other: Trace) -> bool:
    return rows_of(one.events) == rows_of(other.events) and (
        one.metadata, one.count, one.rank, one.world_size, one.base, one.notes,
    ) == (other.metadata, other.count, other.rank, other.world_size, other.base, other.notes)  # fmt: skip


def test_cached_trace_is_reopened_without_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "made.json.gz")
    first = open_trace(path, cache=True)
    assert cache_path(path).is_file()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []

    def never(*arguments: object, **named: object) -> Trace:
        raise AssertionError("parsed again")

    monkeypatch.setattr(cache, "read_trace", never)
    assert same(open_trace(path), first)


def test_no_cache_is_written_by_default(tmp_path: Path) -> None:
    path = made(tmp_path / "made.json")
    open_trace(path)
    assert [file.name for file in tmp_path.iterdir()] == ["made.json"]


@pytest.mark.parametrize("change", ["content", "time", "version", "damage", "foreign"])
def test_stale_cache_is_not_used(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "made.json")
    open_trace(path, cache=True)
    kept = cache_path(path)
    before = path.stat()
    expected = "aten::mm"
    if change == "content":
        expected = "aten::xx"
        made(path, expected)
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "version":
        monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    elif change == "damage":
        kept.write_bytes(kept.read_bytes()[:-200])
    else:
        kept.write_bytes(b"not parquet")
    read: list[object] = []
    parse = cache.read_trace
    monkeypatch.setattr(cache, "read_trace", lambda path: read.append(path) or parse(path))
    assert expected in open_trace(path, cache=True).events.words["name"]
    assert read == [path]
    open_trace(path)
    assert read == [path]  # rewritten


def test_missing_trace_with_cache_is_error(tmp_path: Path) -> None:
    path = made(tmp_path / "made.json")
    open_trace(path, cache=True)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        open_trace(path)
    path.write_text("{}")
    with pytest.raises(TraceError, match="without an array traceEvents"):
        open_trace(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "link", "bomb"])
def test_cache_that_may_not_be_read_is_ignored(kind: str, tmp_path: Path) -> None:
    path = made(tmp_path / "made.json")
    first = open_trace(path, cache=True)
    kept = cache_path(path)
    if kind == "bomb":
        table = parquet.read_table(kept)
        rows = 10_000_000
        columns = {name: np.zeros(rows, table[name].type.to_pandas_dtype()) for name in table.column_names}
        parquet.write_table(pa.table(columns).replace_schema_metadata(table.schema.metadata), kept)
        assert kept.stat().st_size < 5_000_000
    elif kind == "link":
        kept.rename(tmp_path / "other.parquet")
        kept.symlink_to(tmp_path / "other.parquet")
    else:
        kept.unlink()
        os.mkfifo(kept)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert same(open_trace(path), first)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB
