"""A compacted run answers as before, is never half there, and is refused where it is damaged."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.analysis import sql
from backlight.analysis.compare import compare
from backlight.findings.evaluate import findings_of
from backlight.records import Finding, Layout, ParameterRecord, Placement, Severity, Subject
from backlight.series import SERIES
from backlight.store.errors import RunExistsError, RunFormatError
from backlight.store.format.manifest import seal
from backlight.store.read.run import Run, open_run
from backlight.store.write.compact import compact, merge_hosts
from backlight.store.write.writer import RunWriter

ODD = [np.nan, np.inf, -np.inf, -0.0, 5e-324, 1.7e308]


def table_of(rank: int, ranks: int, sharded: bool, more: tuple[str, ...] = ()) -> tuple[ParameterRecord, ...]:
    layout = Layout.SHARD if sharded else Layout.REPLICATE if ranks > 1 else Layout.WHOLE
    place = Placement(layout, (6 * ranks, 2), (6, 2) if sharded else (6 * ranks, 2), (6 * rank * sharded, 0))
    names = [*(f"layers.{i}.weight" for i in range(5)), *more]
    return tuple(ParameterRecord(n, (6 * ranks, 2), "float32", "cpu", 12, placement=place) for n in names)


def write(path: Path, ranks: int, *, sharded: bool, attempts: int = 2) -> None:
    """Write attempts that overlap, with every kind of row and every kind of number."""
    for attempt in range(attempts):
        offset = {"step_offset": 7} if attempt else {}
        writers = [
            RunWriter.create(
                path, rank=r, world_size=ranks, run_id="job", resume=True, monitors=("health",), **offset
            )
            for r in range(ranks)
        ]
        for rank, writer in enumerate(writers):
            source = np.random.default_rng(100 * attempt + (rank if sharded else 0))
            tables = [table_of(rank, ranks, sharded), table_of(rank, ranks, sharded, ("head.weight",))]
            for step in range(12):
                table = tables[step >= 6]
                identifier, P = writer.parameter_table(table), len(table)
                floats = np.exp(source.standard_normal((P, 3)))
                floats[step % P] = ODD[step % len(ODD)]
                ints = source.integers(0, 9, (P, 5))
                ints[:, 0], ints[:, 1] = source.random(P) > 0.2, 12
                writer.append("gradient", step, identifier, floats, ints)
                writer.append("gradient", step, identifier, floats / 2, ints, part=1)
                if step % 3 == 0:
                    writer.append("update", step, identifier, floats[:, :2], ints[:, [0, 2, 1]])
                    writer.append("histogram", step, identifier, np.zeros((P, 0)), np.ones((P, 65)))
                if step == 8:  # written twice: the last counts
                    writer.append("gradient", step, identifier, floats + 1, ints)
                writer.scalars(step, {"loss": ODD[(step + rank) % 6], "backwards_seen": float(step)})
                writer.scalar(step, 'näme, with "quotes"', float(step), source="user")
            writer.event(3, "mark", {"rank": rank, "value": float("nan")})
            writer.event(None, "cost", {"start": 1.0})
        writers[0].finding(
            Finding(
                severity=Severity.INFO, title="t", detail="d", subject=Subject(), evidence=(), fix="f",
                refuted_if="r",
            )
        )  # fmt: skip
        for writer in reversed(writers):
            writer.close()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are equal bit by bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_equal_runs(a: Run, b: Run) -> None:
    assert (a.losses, a.parameters(), a.ranks(), a.attempts) == (
        b.losses,
        b.parameters(),
        b.ranks(),
        b.attempts,
    )
    assert a.scalar_names() == b.scalar_names()
    assert repr(a.events()) == repr(b.events())
    assert a.stored_findings() == b.stored_findings()
    assert (a.last_step(), a.fingerprint()) == (b.last_step(), b.fingerprint())
    ranks = {None, *(state.rank for state in a.ranks())}
    for name, schema in SERIES.items():
        assert a.has(name) == b.has(name)
        assert same(a.series_steps(name), b.series_steps(name))
        columns = [*schema.columns, *schema.derived]
        for column in columns if name != "histogram" else columns[:4]:
            for where in [
                *({"rank": rank} for rank in ranks),
                {"attempt": 0},
                {"part": 1},
                {"attempt": 1, "rank": 0, "part": 1},
            ]:
                x, y = a.frame(name, column.name, **where), b.frame(name, column.name, **where)
                assert (x.names, x.unit) == (y.names, y.unit)
                assert same(x.steps, y.steps)
                assert same(x.measured, y.measured)
                assert same(x.incomplete(), y.incomplete())
                assert np.array_equal(x.values, y.values, equal_nan=True), (name, column.name, where)
    for source in ("backlight", "user"):
        for name in a.scalar_names(source):
            x, y = a.scalar(name, source), b.scalar(name, source)
            assert same(x.steps, y.steps)
            assert same(x.values, y.values)
            assert same(a.spread(name, source).values, b.spread(name, source).values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sharded"),
    [(1, False), (3, False), (3, True), (1, True)],
    ids=["one", "copies", "shards", "shard"],
)
def test_a_compacted_run_answers_as_before(tmp_path: Path, ranks: int, sharded: bool) -> None:
    write(tmp_path / "run", ranks, sharded=sharded)
    before = open_run(shutil.copytree(tmp_path / "run", tmp_path / "before"))
    assert before.frame("gradient", "norm").measured.any()
    result = compact(tmp_path / "run")
    assert result.notes == []
    assert list((tmp_path / "run").rglob("*.db")) == []
    after = open_run(tmp_path / "run")
    assert_equal_runs(before, after)
    assert findings_of(after) == findings_of(before)
    pair, control = compare([before, after]), compare([before, before])
    assert pair.differences == control.differences == ()
    for statement in (
        "SELECT * FROM gradient ORDER BY ALL", "SELECT * FROM scalars ORDER BY ALL", "SELECT * FROM events"
    ):  # fmt: skip
        with sql.query(before, statement) as one, sql.query(after, statement) as other:
            assert repr(list(one.rows())) == repr(list(other.rows()))


@pytest.mark.slow
def test_an_attempt_after_compaction_joins_the_columns(tmp_path: Path) -> None:
    write(tmp_path / "run", 2, sharded=True, attempts=1)
    compact(tmp_path / "run")
    write(tmp_path / "both", 2, sharded=True)
    writers = [
        RunWriter.create(tmp_path / "run", rank=r, world_size=2, run_id="job", resume=True, step_offset=7)
        for r in range(2)
    ]
    for writer in writers:
        writer.scalar(0, "loss", 0.5)
        writer.close()
    run = open_run(tmp_path / "run")
    assert [a.ranks for a in run.attempts] == [(0, 1), (0, 1)]
    assert run.losses == ()
    assert run.scalar("loss").steps.tolist() == list(range(12))
    assert run.scalar("loss").values[7] == 0.5
    compact(tmp_path / "run", every=3)
    assert open_run(tmp_path / "run").series_steps("gradient").tolist() == [0, 3, 6, 9]
    assert [p.name for p in (tmp_path / "run").glob("attempt-000/columns-*")] == ["columns-000001"]


@pytest.mark.slow
def test_columns_are_parquet_that_duckdb_reads(tmp_path: Path) -> None:
    duckdb: Any = pytest.importorskip("duckdb")
    write(tmp_path / "run", 3, sharded=True, attempts=1)
    compact(tmp_path / "run")
    folder = tmp_path / "run" / "attempt-000" / "columns-000000"
    frame = open_run(tmp_path / "run").frame("gradient", "norm")
    rows = duckdb.sql(
        f"SELECT norm FROM '{folder}/gradient-joined.parquet'"
        " WHERE part = 0 AND parameter = 'layers.2.weight' ORDER BY step"
    ).fetchall()
    at = frame.names.index("layers.2.weight")
    assert np.array_equal([row[0] for row in rows], frame.values[:, at], equal_nan=True)
    count = duckdb.sql(f"SELECT count(DISTINCT rank) FROM '{folder}/gradient.parquet'").fetchall()
    assert count == [(3,)]


@pytest.fixture
def columns(tmp_path: Path) -> Path:
    write(tmp_path / "run", 2, sharded=True, attempts=1)
    compact(tmp_path / "run")
    return tmp_path / "run" / "attempt-000" / "columns-000000"


def flip(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    at = int(len(data) * share)
    data[at : at + 16] = bytes(255 - byte for byte in data[at : at + 16])
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.07, 0.995], ids=["norm", "footer"])
def test_damaged_columns_are_one_error(columns: Path, share: float) -> None:
    flip(columns / "gradient-joined.parquet", share)
    run = open_run(columns.parent.parent)
    with pytest.raises(
        RunFormatError, match=r"^[^\n]*gradient-joined.parquet: is damaged: [^\n]*; restore it from"
    ):
        for column in SERIES["gradient"].columns:
            run.frame("gradient", column.name)
    with pytest.raises(RunFormatError, match=r"gradient-joined\.parquet: is damaged"):
        findings_of(open_run(columns.parent.parent))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: (p / "scalars.parquet").unlink(), "scalars.parquet: cannot be read: No such file"),
        (lambda p: (p / "scalars.parquet").write_bytes(b"PAR1"), "has 4 bytes, expected"),
        (lambda p: (p / "index.json").write_text("{"), "index.json: is not valid JSON"),
        (
            lambda p: (p / "index.json").write_text('{"kind": "x"}'),
            "has kind 'x', expected 'backlight columns'",
        ),
    ],
    ids=["missing", "truncated", "json", "kind"],
)
def test_a_dataset_that_is_not_whole_is_refused(
    columns: Path, change: Callable[[Path], object], words: str
) -> None:
    change(columns)
    with pytest.raises(RunFormatError, match=f"nothing in this run can be read: [^\n]*{words}"):
        open_run(columns.parent.parent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("run_id", "other", "belongs to another run"),
        ("names", [], "refers to lists that are not there"),
        ("files", {"../x.parquet": 1}, "it lists the file '../x.parquet'"),
        ("format", 99, "format 99, this release reads format 5"),
    ],
)
def test_an_index_that_lies_is_refused(columns: Path, key: str, value: object, words: str) -> None:
    document = json.loads((columns / "index.json").read_text()) | {key: value}
    if key == "run_id":
        document["launch"] = value
    del document["crc"]
    (columns / "index.json").write_bytes(seal(json.dumps(document)))
    with pytest.raises(RunFormatError, match=words):
        open_run(columns.parent.parent)


@pytest.mark.slow
def test_claims_of_more_rows_than_bytes_allow_are_refused(
    columns: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backlight.store.read.columnar.FREE_ROWS", 0)
    monkeypatch.setattr("backlight.store.read.columnar.MAX_ROWS_PER_BYTE", 0)
    with pytest.raises(RunFormatError, match=r"is damaged: \d+ bytes claim \d+ rows"):
        open_run(columns.parent.parent).frame("gradient", "norm")


@pytest.mark.slow
def test_without_pyarrow_runs_stay_and_columns_name_the_library(
    tmp_path: Path, columns: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "other", 1, sharded=False, attempts=1)
    whole = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return whole(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        RunFormatError, match=r"needs pyarrow, which is not installed: pip install 'backlight\["
    ):
        open_run(columns.parent.parent).frame("gradient", "norm")
    assert any("stay as they are: pyarrow is not installed" in n for n in compact(tmp_path / "other").notes)
    assert len(open_run(tmp_path / "other").series_steps("gradient")) == 12


def test_a_failed_verification_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", 1, sharded=False, attempts=1)
    before = (tmp_path / "run" / "attempt-000" / "rank-00000.db").read_bytes()
    monkeypatch.setattr("backlight.store.write.columnar._digest", id)
    notes = compact(tmp_path / "run").notes
    assert any("stay as they are: " in note and "is not what was read" in note for note in notes)
    assert (tmp_path / "run" / "attempt-000" / "rank-00000.db").read_bytes() == before
    assert not list((tmp_path / "run" / "attempt-000").glob("*columns*"))


@pytest.mark.slow
def test_a_compacted_part_is_not_joined(tmp_path: Path, columns: Path) -> None:
    write(tmp_path / "whole", 2, sharded=True, attempts=1)
    with pytest.raises(RunExistsError, match="was compacted; join the parts first, then compact the run"):
        merge_hosts(tmp_path / "whole", [columns.parent.parent])
