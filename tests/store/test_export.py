from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest

from backlight.extras import MissingPackageError
from backlight.records import ParameterRecord
from backlight.store import export as exporting
from backlight.store import tables
from backlight.store.errors import ExportError
from backlight.store.export import export
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter

NAMES = ["a,b", 'quote"\nline', "=1+1"]

LONG_NAMES = ("step", "attempt", "parameter", "measured", *tables._LONG)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    writer = RunWriter.create(tmp_path / "run")
    table = writer.parameter_table(tuple(ParameterRecord(n, (4,), "float32", "cpu", 4) for n in NAMES))
    for step in range(3):
        floats = np.full((3, 3), step + 1.0)
        ints = [[1, 4, 1, 0, 0], [0, 4, 9, 9, 9], [1, 4, 0, 2, 0]]
        floats[2] = np.nan
        writer.append("gradient", step, table, floats, ints)
        writer.scalars(step, {"loss": math.nan if step == 1 else step / 2, "lr/0/0": 0.1})
        writer.scalar(step, "accuracy", math.inf, source="user")
    writer.append("update", 2, table, np.array([[1.0, 4.0]] * 3), np.array([[1, 4, 4]] * 3))
    writer.close()
    second = RunWriter.create(tmp_path / "run", resume=True)
    record = (ParameterRecord("a,b", (4,), "float32", "cpu", 4),)
    second.append("gradient", 0, second.parameter_table(record), [[8.0, 1.0, 4.0]], [[1, 4, 0, 0, 0]])
    second.close()
    return open_run(tmp_path / "run")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv(run: Run, tmp_path: Path) -> None:
    made = export(run, tmp_path / "out.csv")
    assert made == (tmp_path / "out.csv", tmp_path / "out.scalars.csv")
    rows = rows_of(made[0])
    assert len(rows) == 4 * 3
    assert [(r["step"], r["attempt"], r["parameter"]) for r in rows[:3]] == [
        ("0", "0", f"'{n}" if n.startswith("=") else n) for n in NAMES
    ]
    first = rows[0]
    assert (first["norm"], first["rms"], first["mean"], first["zeros"]) == ("1.0", "0.5", "0.25", "1")
    assert (first["measured"], first["numel"], first["update_ratio"]) == ("1", "4", "")
    unmeasured = rows[1]
    assert unmeasured["measured"] == "0"
    assert {unmeasured[c] for c in LONG_NAMES[4:]} == {""}
    assert (rows[2]["norm"], rows[2]["nan"], rows[2]["measured"]) == ("nan", "2", "1")
    assert (rows[6]["update_norm"], rows[6]["weight_norm"], rows[6]["update_ratio"]) == ("1.0", "4.0", "0.25")
    last = rows[9]
    assert (last["step"], last["attempt"], last["norm"], last["rms"]) == ("3", "1", "8.0", "4.0")
    assert rows[10]["measured"] == "0"
    scalars = rows_of(made[1])
    assert [(r["step"], r["value"]) for r in scalars if r["name"] == "loss"] == [
        ("0", "0.0"),
        ("1", "nan"),
        ("2", "1.0"),
    ]
    assert {(r["source"], r["name"], r["value"], r["unit"]) for r in scalars if r["source"] == "user"} == {
        ("user", "accuracy", "inf", "1")
    }


@pytest.mark.slow
def test_parquet_has_types_and_nulls(run: Run, tmp_path: Path) -> None:
    made = export(run, tmp_path / "out.parquet")
    table = pq.read_table(made[0])
    assert tuple(table.column_names) == LONG_NAMES
    assert str(table.schema.field("zeros").type) == "int64"
    assert str(table.schema.field("norm").type) == "double"
    assert str(table.schema.field("measured").type) == "bool"
    rows = table.to_pylist()
    assert len(rows) == 12
    assert rows[1] == dict.fromkeys(LONG_NAMES) | {
        "step": 0,
        "attempt": 0,
        "parameter": 'quote"\nline',
        "measured": False,
    }
    assert math.isnan(rows[2]["norm"])
    assert (rows[6]["update_ratio"], rows[0]["update_ratio"]) == (0.25, None)
    scalars = pq.read_table(made[1]).to_pylist()
    assert len(scalars) == 9
    loss = [row["value"] for row in scalars if row["name"] == "loss"]
    assert (loss[0], math.isnan(loss[1]), loss[2]) == (0.0, True, 1.0)


@pytest.mark.slow
def test_csv_and_parquet_are_equal(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CHUNK_ROWS", 4)
    text = rows_of(export(run, tmp_path / "out.csv", raw=True)[0])
    typed = pq.read_table(export(run, tmp_path / "out.parquet")[0]).to_pylist()
    for row, other in zip(text, typed, strict=True):
        as_text = {
            k: "" if v is None else str(int(v)) if isinstance(v, bool) else str(v) for k, v in other.items()
        }
        assert row == as_text


@pytest.mark.slow
def test_hdf5(run: Run, tmp_path: Path) -> None:
    (made,) = export(run, tmp_path / "out.h5")
    with h5py.File(made) as file:
        assert [n.decode() for n in file["parameters"][:]] == NAMES
        assert file["gradient/step"][:].tolist() == [0, 1, 2, 3]
        np.testing.assert_array_equal(file["gradient/rms"][:], run.frame("gradient", "rms").values)
        assert file["gradient/measured"][:].tolist()[0] == [1, 0, 1]
        assert file["gradient/rms"].attrs["unit"] == "gradient"
        assert list(file["gradient/rms"].attrs["dims"]) == ["step", "parameter"]
        assert file["update/ratio"][:].tolist() == [[0.25, 0.25, 0.25]]
        scalars = {g.attrs["name"]: g["value"][:].tolist() for g in file["scalars/backlight"].values()}
        assert scalars["lr/0/0"] == [0.1, 0.1, 0.1]
        assert "histogram" not in file


def test_existing_export_is_not_overwritten_by_default(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.scalars.csv").write_text("mine")
    with pytest.raises(ExportError, match=r"out\.scalars\.csv: exists already; choose another name"):
        export(run, tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()
    export(run, tmp_path / "out.csv", overwrite=True)
    assert (tmp_path / "out.scalars.csv").read_text().startswith("step,attempt,source,name,value,unit")


@pytest.mark.parametrize("name", ["out.xlsx", "out", "out.parquet.gz"])
def test_unknown_file_suffix_is_rejected(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match=r"is not known; use one of \.csv, \.parquet, \.h5"):
        export(run, tmp_path / name)


def test_missing_library_error_names_the_fix(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "pyarrow" else real(n))
    with pytest.raises(
        MissingPackageError, match=r"out\.parquet: needs pyarrow; pip install 'backlight\[parquet\]'"
    ):
        export(run, tmp_path / "out.parquet")
    export(run, tmp_path / "out.csv")


def test_missing_directory_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"the folder .* does not exist"):
        export(run, tmp_path / "missing" / "out.csv")


@pytest.mark.parametrize("ending", ["csv", "parquet", "h5"])
def test_failed_export_leaves_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting.atomic_files, "sync_file", full)
    target = tmp_path / "exports"
    target.mkdir()
    with pytest.raises(ExportError, match="cannot be written: No space left on device"):
        export(run, target / f"out.{ending}")
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("ending", ["csv", "parquet", "h5"])
def test_empty_run_and_hostile_names_are_exported(
    tmp_path: Path, ending: str, record: Callable[..., object]
) -> None:
    RunWriter.create(tmp_path / "empty").close()
    assert all(p.exists() for p in export(open_run(tmp_path / "empty"), tmp_path / f"empty.{ending}"))
    writer = RunWriter.create(tmp_path / "hostile")
    record(writer, 2, names=["a\0b", "\udcff", "../x"])
    writer.scalar(0, "nul\0../\udcff", 1.0, source="user")
    writer.close()
    assert all(p.exists() for p in export(open_run(tmp_path / "hostile"), tmp_path / f"hostile.{ending}"))
