"""Spectra in a long table: one row per step, layer and direction; unmeasured values are empty."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from backlight.store.export import ExportError, export
from backlight.store.read.run import Run, open_run
from backlight.store.spectra import table
from backlight.store.write.writer import RunWriter
from spectra_runs import Injected, write_spectra, write_spectra_run

HEAD = "head.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_spectra_run(tmp_path_factory.mktemp("spectra") / "run", Injected(steps=(0, 50)))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_spectra_run_exports_its_directions(run: Run, tmp_path: Path) -> None:
    made = export(run, tmp_path / "out.csv")
    assert made == (tmp_path / "out.csv",)
    rows = rows_of(made[0])
    assert len(rows) == 2 * (24 + 32 + 20)
    stored = table(run, 50, HEAD)
    head_rows = [row for row in rows if row["parameter"] == HEAD and row["step"] == "50"]
    assert [int(row["direction"]) for row in head_rows] == list(range(20))
    for column, field in {
        "singular_value": "singular_value",
        "singular_value_low": "singular_value_low",
        "spectral_echo": "echo",
        "spectral_echo_high": "echo_high",
        "spectral_echo_null": "echo_null",
        "left_alignment": "left_alignment",
        "right_alignment": "right_alignment",
    }.items():
        got = np.array([float(row[column] or "nan") for row in head_rows])
        np.testing.assert_array_equal(got, stored[field], err_msg=column)
    first = head_rows[0]
    assert (first["layer"], first["shape"], first["replicates"]) == ("head", "20x36", "12")
    assert float(first["aspect_ratio"]) == pytest.approx(20 / 36)
    assert float(first["noise_scale"]) == stored.measurement["noise_scale"]
    assert float(first["noise_sigma"]) == pytest.approx(1e-3, rel=0.05)
    assert {row["stable_rank_weight"] for row in head_rows} == {"8.5"}


def test_unmeasured_values_are_empty(tmp_path: Path) -> None:
    plan = Injected(steps=(0,), shapes={HEAD: (20, 36)}, batch=math.nan)
    (row, *_) = rows_of(export(write_spectra_run(tmp_path / "run", plan), tmp_path / "out.csv")[0])
    for name in ("noise_scale", "batch", "stable_rank_momentum", "stable_rank_update"):
        assert row[name] == ""


@pytest.mark.slow
def test_layer_without_directions_has_one_row(tmp_path: Path) -> None:
    plan = Injected(steps=(0,), shapes={HEAD: (330, 340)}, strengths={}, replicates=4)
    rows = rows_of(export(write_spectra_run(tmp_path / "run", plan), tmp_path / "out.csv")[0])
    assert len(rows) == 1
    assert rows[0]["direction"] == rows[0]["singular_value"] == rows[0]["spectral_echo"] == ""
    assert rows[0]["identifiable"] == "0"


@pytest.mark.slow
def test_directions_are_limited_and_parquet_equals_csv(run: Run, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from_csv = rows_of(export(run, tmp_path / "out.csv", max_directions=3)[0])
    assert len(from_csv) == 2 * 3 * 3
    arrow = pq.read_table(export(run, tmp_path / "out.parquet", max_directions=3)[0]).to_pylist()
    assert list(arrow[0]) == list(from_csv[0])
    for one, other in zip(arrow, from_csv, strict=True):
        assert one["spectral_echo"] == float(other["spectral_echo"])
        assert one["stable_rank_momentum"] is None
        assert (one["parameter"], one["replicates"]) == (other["parameter"], int(other["replicates"]))


@pytest.mark.slow
def test_rows_option_is_required_for_gradients_and_spectra(tmp_path: Path) -> None:
    from backlight.records import ParameterRecord

    writer = RunWriter.create(tmp_path / "run", monitors=("health", "spectra"), step_offset=0)
    table_id = writer.parameter_table((ParameterRecord("w", (2,), "float32", "cpu", 2),))
    writer.append("gradient", 0, table_id, np.ones((1, 3)), np.array([[1, 2, 0, 0, 0]]))
    write_spectra(writer, Injected(steps=(0,), shapes={HEAD: (20, 36)}))
    writer.close()
    both = open_run(tmp_path / "run")
    assert "norm" in rows_of(export(both, tmp_path / "parameters.csv")[0])[0]
    assert "spectral_echo" in rows_of(export(both, tmp_path / "spectra.csv", "spectra")[0])[0]
    with pytest.raises(ExportError, match="--max-directions is for the rows of spectra"):
        export(both, tmp_path / "more.csv", max_directions=2)


@pytest.mark.slow
def test_invalid_rows_option_is_rejected(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="at least 1, got 0"):
        export(run, tmp_path / "out.csv", max_directions=0)
    with pytest.raises(ExportError, match=r"\.h5 holds every series and array"):
        export(run, tmp_path / "out.h5", "spectra")
    with pytest.raises(ExportError, match="holds no table 'layers'"):
        export(run, tmp_path / "out.csv", "layers")
    writer = RunWriter.create(tmp_path / "none", monitors=("health",), step_offset=0)
    writer.close()
    with pytest.raises(ExportError, match="holds no spectra"):
        export(open_run(tmp_path / "none"), tmp_path / "out.csv", "spectra")
    assert list(tmp_path.glob("out*")) == []
