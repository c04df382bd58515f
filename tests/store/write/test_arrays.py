from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backlight.store.format import arrays
from backlight.store.format.arrays import ArrayInfo
from backlight.store.format.names import parse_piece, piece_name, unmerged
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    ">f4",
]


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    values=st.sampled_from(DTYPES).flatmap(
        lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    )
)
def test_arrays_round_trip(tmp_path_factory: pytest.TempPathFactory, values: np.ndarray) -> None:
    path = tmp_path_factory.mktemp("run")
    writer = RunWriter.create(path)
    writer.array("a", 3, values, unit="gradient")
    writer.close()
    run = open_run(path)
    steps, (back,) = run.array("a")
    assert steps.tolist() == [3]
    assert back.shape == values.shape
    assert back.dtype.newbyteorder("=") == values.dtype.newbyteorder("=")
    assert back.astype(values.dtype).tobytes() == values.tobytes()
    assert (run.array_info("a").unit, run.array_info("a").dtype) == ("gradient", values.dtype.name)
    assert run.losses == ()


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    bits = np.array([[0x3F80, 0xC000, 0x7F80, 0x0001]], dtype=np.uint16)
    writer = RunWriter.create(tmp_path)
    writer.array("g", 0, bits, dims=("row", "column"), encoding="bf16")
    writer.close()
    run = open_run(tmp_path)
    info = run.array_info("g")
    assert (info.encoding, info.encoding_version, info.dtype, info.dims) == (
        "bf16",
        1,
        "bfloat16",
        ("row", "column"),
    )
    (value,) = run.array("g")[1]
    assert value.dtype == np.float32
    assert value.tolist() == [[1.0, -2.0, np.inf, 2.0**-133]]


@pytest.mark.parametrize(
    ("values", "arguments", "match"),
    [
        (np.array(["text"]), {}, "has type <U4, expected booleans"),
        (np.array([object()]), {}, "has type object, expected booleans"),
        (np.zeros((2, 2)), {"dims": ("a",)}, r"has 2 axes, but 1 dims"),
        (np.zeros(2), {"encoding": "zip"}, "there is no encoding 'zip'; there are plain, bf16"),
        (np.zeros(2), {"encoding": "bf16"}, "stores 16 bits as uint16, got float64"),
    ],
)
def test_arrays_that_contradict_their_spec_are_rejected(
    tmp_path: Path, values: np.ndarray, arguments: dict[str, str], match: str
) -> None:
    writer = RunWriter.create(tmp_path)
    with pytest.raises(ValueError, match=match):
        writer.array("a", 0, values, **arguments)
    assert writer.lost is None
    writer.close()


def test_shapes_may_change_and_the_caller_may_reuse_its_array(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path)
    values = np.zeros(2)
    for step in range(4):
        values[:] = step
        writer.array("a", step, values if step % 2 else np.full((step, 1), 7.0))
    writer.close()
    steps, found = open_run(tmp_path).array("a")
    assert steps.tolist() == [0, 1, 2, 3]
    assert [a.tolist() for a in found] == [[], [1.0, 1.0], [[7.0], [7.0]], [3.0, 3.0]]


@pytest.mark.slow
def test_many_flushes_leave_few_pieces(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path)
    for step in range(100):
        writer.array("a", step, np.full(1000, float(step)))
        writer.array("b", step, np.array(step))
        writer.flush()
    hdf5_pieces = list((tmp_path / "attempt-000" / "arrays").iterdir())
    assert len(hdf5_pieces) <= 8
    steps, found = open_run(tmp_path).array("a")
    assert steps.tolist() == list(range(100))
    assert all((a == s).all() for s, a in zip(steps, found, strict=True))
    writer.close()
    assert open_run(tmp_path).losses == ()


@pytest.mark.slow
def test_pieces_roll_over_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_MERGED_BYTES", 50_000)
    writer = RunWriter.create(tmp_path)
    for step in range(30):
        writer.array("a", step, np.zeros(1000))
        writer.flush()
    writer.close()
    sizes = [p.stat().st_size for p in (tmp_path / "attempt-000" / "arrays").iterdir()]
    assert max(sizes) <= 50_000
    assert len(sizes) >= 30 * 8000 / 50_000
    assert len(open_run(tmp_path).array("a")[1]) == 30


def test_interrupted_merge_counts_no_array_twice(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path)
    folder = tmp_path / "attempt-000" / "arrays"
    writer.array("a", 0, np.zeros(10))
    writer.flush()
    kept = folder / piece_name(0, 0)
    shutil.copyfile(kept, tmp_path / "copy.h5")
    writer.array("a", 1, np.ones(10))
    writer.flush()
    writer.close()
    assert [p.name for p in folder.iterdir()] == ["rank-00000-000000-000001.h5"]
    shutil.copyfile(tmp_path / "copy.h5", kept)
    run = open_run(tmp_path)
    assert run.array("a")[0].tolist() == [0, 1]
    assert run.losses == ()


def test_piece_names() -> None:
    assert parse_piece(piece_name(3, 0)) == (3, 0, 0)
    assert parse_piece(piece_name(3, 2, 9)) == (3, 2, 9)
    for name in ("rank-00000.db", ".rank-00000-000000.h5.1.tmp", "rank-0-0.h5", "x"):
        assert parse_piece(name) is None


def test_widest_of_overlapping_pieces_is_used() -> None:
    spans = [("a", (0, 0, 0)), ("b", (0, 0, 3)), ("c", (0, 2, 3)), ("d", (0, 4, 4)), ("e", (1, 0, 0))]
    assert unmerged(spans) == ["b", "d", "e"]


@pytest.mark.slow
def test_lowest_rank_and_latest_attempt_take_precedence(
    tmp_path: Path, record: Callable[..., object]
) -> None:
    writers = [RunWriter.create(tmp_path, rank=r, world_size=2, run_id="x") for r in range(2)]
    for writer in writers:
        for step in range(writer.rank, 3):
            writer.array("a", step, np.array(writer.rank))
    for writer in writers:
        writer.close()
    run = open_run(tmp_path)
    assert [int(a) for a in run.array("a")[1]] == [0, 0, 0]
    assert [int(a) for a in run.array("a", rank=1)[1]] == [1, 1]
    again = RunWriter.create(tmp_path, step_offset=2, resume=True)
    again.array("a", 0, np.array(9))
    again.close()
    run = open_run(tmp_path)
    assert [int(a) for a in run.array("a")[1]] == [0, 0, 9]
    assert [int(a) for a in run.array("a", attempt=0)[1]] == [0, 0, 0]


def test_evidence_has_safe_and_unique_names(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    paths = [
        writer.evidence("stack.txt", "größe \udcff"),
        writer.evidence("stack.txt", b"\0\1"),
        writer.evidence("../../../etc/passwd", b"x"),
        writer.evidence("", b"y"),
        writer.evidence("/abs\nolute", b"z"),
    ]
    writer.close()
    assert paths == [
        "attempt-000/evidence/stack.txt",
        "attempt-000/evidence/stack-1.txt",
        "attempt-000/evidence/etc-passwd",
        "attempt-000/evidence/evidence",
        "attempt-000/evidence/abs-olute",
    ]
    run = open_run(tmp_path / "run")
    assert run.evidence() == tuple(sorted(paths))
    assert run.read_evidence(paths[0]) == "größe \\udcff".encode()
    assert run.read_evidence(paths[1]) == b"\0\1"


def test_evidence_is_read_only_from_its_directory(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    writer = RunWriter.create(tmp_path / "run")
    writer.evidence("a", b"x")
    writer.close()
    (tmp_path / "run" / "attempt-000" / "evidence" / "link").symlink_to(tmp_path / "secret")
    run = open_run(tmp_path / "run")
    assert run.evidence() == ("attempt-000/evidence/a",)
    for path in (
        "../secret",
        "attempt-000/evidence/link",
        "attempt-000/evidence/../../../secret",
        "manifest.json",
    ):
        with pytest.raises(KeyError, match="has no evidence"):
            run.read_evidence(path)


@pytest.mark.slow
def test_one_array_is_found_without_opening_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter.create(tmp_path / "run")
    for name in range(20):
        writer.array(f"layer/{name}", 0, [float(name)])
        writer.array(f"layer/{name}", 1, [[float(name)]])  # another shape and therefore another group
    writer.flush()
    opened: list[str] = []
    original = arrays._info

    def counted(path: Path, group: Any) -> ArrayInfo:
        opened.append(group.name)
        return original(path, group)

    monkeypatch.setattr(arrays, "_info", counted)
    run = open_run(tmp_path / "run")
    assert [v.tolist() for v in run.array("layer/3")[1]] == [[3.0], [[3.0]]]
    opened.clear()
    assert [v.tolist() for v in run.array("layer/7")[1]] == [[7.0], [[7.0]]]
    assert len(opened) == 2
    opened.clear()
    assert run.array_info("layer/7").unit == "1"
    assert len(opened) == 2
    # Later arrays, in pieces that replace these, are found as well.
    writer.array("layer/7", 2, [9.0])
    writer.array("late", 2, [1.0])
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.array("layer/7")[0].tolist() == [0, 1, 2]
    assert run.array("late")[1][0].tolist() == [1.0]
