"""Compressed arrays: exact, smaller, and limited to the filters of every HDF5 build."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from backlight.store.format.arrays import (
    ArrayInfo,
    Filters,
    Stack,
    _chunk_shape,
    read_piece,
    write_piece,
)
from backlight.store.read.run import RunFormatError, open_run
from backlight.store.write.writer import RunWriter


def gradients(steps: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=size))
    return np.stack([rng.normal(size=size) * scale for _ in range(steps)]).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("filters", [Filters(), Filters("gzip", 9), Filters("lzf"), Filters("none")])
def test_arrays_are_read_exactly(filters: Filters, tmp_path: Path) -> None:
    values = gradients(40, 3000)
    writer = RunWriter.create(tmp_path / "run", filters=filters)
    for step, row in enumerate(values):
        writer.array("gradient/w", step, row.reshape(30, 100), dims=("out", "in"))
        if step % 7 == 0:
            writer.flush()
    writer.close()
    run = open_run(tmp_path / "run")
    steps, back = run.array("gradient/w")
    assert steps.tolist() == list(range(40))
    assert np.array_equal(np.stack(back), values.reshape(40, 30, 100))
    assert run.losses == ()
    size = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*.h5"))
    if filters.compression == "gzip":
        assert size < 0.93 * values.nbytes
    else:
        assert size < 1.1 * values.nbytes


@pytest.mark.slow
def test_unfinished_pieces_are_readable(tmp_path: Path) -> None:
    values = gradients(9, 2000)
    writer = RunWriter.create(tmp_path / "run")
    for step, row in enumerate(values):
        writer.array("g", step, row)
        writer.flush()
    assert np.array_equal(np.stack(open_run(tmp_path / "run").array("g")[1]), values)
    writer.close()
    assert np.array_equal(np.stack(open_run(tmp_path / "run").array("g")[1]), values)


def test_chunks_span_time_without_padding() -> None:
    assert _chunk_shape((17, 100), 4) == (9, 100)
    assert _chunk_shape((1000, 100), 4) == (16, 100)
    assert _chunk_shape((5, 1024, 1024), 4) == (1, 256, 1024)
    assert _chunk_shape((3, 1, 1024 * 1024), 4) == (1, 1, 1024 * 1024)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zstd", 1), r"compression 'zstd': expected one of gzip, lzf, none"),
        (("gzip", 11), "expected 0 to 9"),
    ],
)
def test_unknown_filters_are_rejected(arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Filters(*arguments)


@pytest.mark.parametrize("fault", ["filter", "bomb", "missing chunk"])
def test_foreign_layouts_are_rejected(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-00000-000000.h5"
    values = gradients(32, 2000)
    info = ArrayInfo("g", ("x",), "float32", "1", "plain", 1)
    write_piece(path, [Stack(info, np.arange(32), values)], Filters())
    with h5py.File(path, "r+") as file:
        group = file["a0"]
        del group["values"]
        if fault == "filter":
            group.create_dataset("values", data=values, chunks=(8, 2000), fletcher32=True)
        elif fault == "bomb":
            group.create_dataset("values", shape=(32, 10**9), dtype="f4", chunks=(1, 10**6), compression=1)
        else:
            made = group.create_dataset("values", shape=values.shape, dtype="f4", chunks=(8, 2000))
            made[:8] = values[:8]
    with pytest.raises(RunFormatError, match=r"uses filters|states|has 1 of 4 chunks"):
        list(read_piece(path))
