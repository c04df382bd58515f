"""A run as tables, pandas and polars frames: null is unmeasured, NaN is NaN."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.records import Finding, ParameterRecord, Severity, Subject
from backlight.store.errors import ExportError
from backlight.store.export import export, schema_of, to_pandas, to_polars
from backlight.store.read.run import Run, open_run
from backlight.store.tables import tables_of
from backlight.store.write.writer import RunWriter

HOSTILE = "a\udcff;'\"\n<b>"


def write(path: Path, attempts: int = 1) -> Run:
    """Write steps 0 to 2 of two parameters; the second is measured at step 1 only, as NaN."""
    records = (
        ParameterRecord("first", (2, 2), "float32", "cpu", 4, group="0/0"),
        ParameterRecord(HOSTILE, (3,), "float32", "cpu", 3, aliases=("tied",)),
    )
    for attempt in range(attempts):
        writer = RunWriter.create(path, monitors=("health",), resume=True)
        table = writer.parameter_table(records)
        for step in range(3):
            floats = np.array([[1.0 + step + 10 * attempt, 1.0, 2.0], [math.nan, math.nan, math.nan]])
            integers = np.array([[1, 4, 1, 0, 0], [int(step == 1), 3, 0, 3, 0]])
            writer.append("gradient", step, table, floats, integers)
            writer.scalars(step, {"loss": 0.5 * step, "time": 100.0 + step})
        writer.scalars(1, {"accuracy": math.nan}, source="user")
        writer.event(1, "noted", {"why": HOSTILE})
        subject = Subject(parameter=HOSTILE, step=1)
        writer.finding(
            Finding(
                rule="non_finite",
                severity=Severity.ERROR,
                title="is NaN",
                detail="is NaN at step 1",
                subject=subject,
                evidence=(),
                fix="look",
                refuted_if="is finite",
            )
        )
        writer.close()
    return open_run(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write(tmp_path_factory.mktemp("runs") / "run")


def rows(run: Run, name: str) -> Iterator[dict[str, Any]]:
    table = tables_of(run)[name]
    for chunk in table.chunks(table.names):
        void = {n: np.ma.getmaskarray(chunk[n]) for n in table.names}
        for i in range(len(chunk[table.names[0]])):
            yield {n: None if void[n][i] else chunk[n][i] for n in table.names}


def test_series_table(run: Run) -> None:
    found = list(rows(run, "gradient"))
    assert [(r["step"], r["measured"]) for r in found] == [
        (0, True), (0, False), (1, True), (1, True), (2, True), (2, False)
    ]  # fmt: skip
    assert [r["norm"] for r in found[::2]] == [1.0, 2.0, 3.0]
    assert found[1]["norm"] is None
    assert found[1]["nan"] is None
    assert math.isnan(found[3]["norm"])
    assert found[3]["nan"] == 3
    assert found[0]["rms"] == 0.5


def test_only_requested_columns_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []
    frame = Run.frame
    monkeypatch.setattr(Run, "frame", lambda self, s, c, **k: requested.append(c) or frame(self, s, c, **k))
    list(tables_of(run)["gradient"].chunks({"step", "norm"}))
    assert requested == ["norm"]
    requested.clear()
    list(tables_of(run)["gradient"].chunks({"parameter"}))
    assert requested == ["measured"]


def test_the_other_tables(run: Run) -> None:
    assert set(tables_of(run)) == {
        "gradient", "steps", "scalars", "events", "findings", "parameters", "attempts"
    }  # fmt: skip
    steps = list(rows(run, "steps"))
    assert [r["loss"] for r in steps] == [0.0, 0.5, 1.0]
    assert steps[0]["user/accuracy"] is None
    assert math.isnan(steps[1]["user/accuracy"])
    assert {(r["source"], r["name"], r["unit"]) for r in rows(run, "scalars")} == {
        ("backlight", "loss", "loss"), ("backlight", "time", "s"), ("user", "accuracy", "1")
    }  # fmt: skip
    (event,) = rows(run, "events")
    assert (event["step"], event["kind"]) == (1, "noted")
    (finding,) = rows(run, "findings")
    assert (finding["rule"], finding["step"], finding["rank"]) == ("non_finite", 1, None)
    first, second = rows(run, "parameters")
    assert (first["shape"], first["numel"], first["group"], first["unmeasured"]) == ("2x2", 4, "0/0", None)
    assert (second["group"], second["aliases"]) == (None, '["tied"]')
    (attempt,) = rows(run, "attempts")
    assert (attempt["attempt"], attempt["status"]) == (0, "finished")


def test_units_are_in_the_schema(run: Run) -> None:
    schema = schema_of(tables_of(run)["gradient"])
    assert schema.field("norm").metadata[b"unit"] == b"gradient"
    assert schema_of(tables_of(run)["steps"], {"time"}).field("time").metadata[b"unit"] == b"s"


@pytest.mark.slow
def test_attempts_are_distinguished(tmp_path: Path) -> None:
    found = [r for r in rows(write(tmp_path / "run", 2), "gradient") if r["parameter"] == "first"]
    assert [(r["attempt"], r["norm"]) for r in found] == [
        (0, 1.0), (0, 2.0), (0, 3.0), (1, 11.0), (1, 12.0), (1, 13.0)
    ]  # fmt: skip


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_every_table_as_a_file(run: Run, tmp_path: Path, ending: str) -> None:
    made = export(run, tmp_path / f"all.{ending}", "all")
    assert {path.name for path in made} == {f"all.{name}.{ending}" for name in tables_of(run)}
    if ending == "csv":
        with (tmp_path / "all.gradient.csv").open(newline="") as file:
            found = list(csv.DictReader(file))
        assert [r["norm"] for r in found] == ["1.0", "", "2.0", "nan", "3.0", ""]
        assert [r["measured"] for r in found] == ["1", "0", "1", "1", "1", "0"]
    else:
        import pyarrow.parquet as pq

        table = pq.read_table(tmp_path / "all.gradient.parquet")
        assert table["norm"].is_null().to_pylist() == [False, True, False, False, False, True]
        assert table.schema.field("norm").metadata[b"unit"] == b"gradient"
    with pytest.raises(ExportError, match="exists already"):
        export(run, tmp_path / f"all.{ending}", "all")
    (one,) = export(run, tmp_path / f"one.{ending}", "events")
    assert one.name == f"one.{ending}"


def test_unknown_tables_and_suffixes_are_rejected(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="holds no table 'histogram'; it has gradient, steps"):
        export(run, tmp_path / "x.csv", "histogram")
    with pytest.raises(ExportError, match=r"\.h5 holds every series and array"):
        export(run, tmp_path / "x.h5", "all")
    with pytest.raises(ExportError, match="does not exist; create it first"):
        export(run, tmp_path / "no" / "x.csv", "all")
    assert list(tmp_path.iterdir()) == []


# Frames


@pytest.mark.slow
def test_polars_keeps_null_and_nan_apart(run: Run) -> None:
    frame = to_polars(run, "gradient", ["step", "norm"])
    assert frame.columns == ["step", "norm"]
    assert frame["norm"].is_null().to_list() == [False, True, False, False, False, True]
    assert frame["norm"].is_nan().to_list() == [False, None, False, True, False, None]
    wide = to_polars(run.frame("gradient", "norm"))
    assert wide["first"].to_list() == [1.0, 2.0, 3.0]
    assert wide[wide.columns[2]].is_null().to_list() == [True, False, True]
    long = to_polars(run.frame("gradient", "norm"), wide=False)
    assert long.shape == (6, 3)


def test_pandas_keeps_null_and_nan_apart(run: Run) -> None:
    frame = to_pandas(run.frame("gradient", "norm"))
    assert frame.index.tolist() == [0, 1, 2]
    assert frame["first"].tolist() == [1.0, 2.0, 3.0]
    other = frame.iloc[:, 1]
    assert other.isna().tolist() == [True, False, True]
    assert math.isnan(other.array.__arrow_array__()[1].as_py())
    assert frame.attrs["units"] == {"first": "gradient", frame.columns[1]: "gradient"}
    steps = to_pandas(run)
    assert steps["loss"].tolist() == [0.0, 0.5, 1.0]
    assert steps.attrs["units"]["time"] == "s"
    assert str(steps["step"].dtype) == "int64[pyarrow]"


@pytest.mark.slow
def test_unknown_table_and_column_names_are_rejected(run: Run) -> None:
    with pytest.raises(KeyError, match="has no table 'gradients'; it has gradient, steps"):
        to_pandas(run, "gradients")
    with pytest.raises(KeyError, match="table 'gradient' has no column 'norms'; it has step, attempt"):
        to_polars(run, "gradient", ["norms"])
