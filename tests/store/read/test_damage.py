"""Damaged, truncated, foreign and malicious directories: a clear error or a reported loss."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from backlight.records import ParameterRecord
from backlight.store.errors import RunFormatError
from backlight.store.format.arrays import read_piece
from backlight.store.format.manifest import read_document, seal, write_document
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter
from fuzz.mutation import set_checksums

Record = Callable[..., tuple[ParameterRecord, ...]]
STEPS, BLOCK = 400, 20


@pytest.fixture
def run_path(tmp_path: Path, record: Record) -> Path:
    writer = RunWriter.create(tmp_path / "run")
    for start in range(0, STEPS, BLOCK):
        record(writer, BLOCK, start=start)
        writer.flush()
    writer.event(3, "mark", {"a": 1})
    writer.array("gram", 0, np.arange(6.0).reshape(2, 3), dims=("a", "b"))
    writer.close()
    return tmp_path / "run"


def database(path: Path) -> Path:
    return path / "attempt-000" / "rank-00000.db"


def change(path: Path, *statements: str | tuple[str, tuple[Any, ...]], seal: bool = True) -> None:
    """Execute statements in the database of the run at ``path``, and set the checksums that fit."""
    with contextlib.closing(sqlite3.connect(database(path))) as connection, connection:
        for statement in statements:
            connection.execute(*([statement] if isinstance(statement, str) else statement))
        if seal:
            set_checksums(connection)


def read_everything(run: Run) -> None:
    run.parameters()
    for name in run.scalar_names():
        run.scalar(name)
    run.series_steps("gradient")
    run.frame("gradient", "rms")
    run.events()
    run.stored_findings()
    run.fingerprint()
    for name in run.array_names():
        run.array(name)
    run.last_step()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "manifest.json: is not valid JSON"),
        (b"{", "manifest.json: is not valid JSON"),
        (b"[1]", "holds a JSON list, expected an object"),
        (b"{}", "has kind None, expected 'backlight run'; another program wrote it"),
        (b'{"kind": "wandb"}', "has kind 'wandb'"),
        (b'{"kind": "backlight run"}', "has format None, expected a number"),
        (b'{"kind": "backlight run", "format": true}', "has format True, expected a number"),
        (
            b'{"kind": "backlight run", "format": 6}',
            r"format 6, this release reads format 5\. Upgrade",
        ),
        (
            b'{"kind": "backlight run", "format": 4}',
            r"format 4, this release .* Open it with the release that",
        ),
        (b'{"kind": "backlight run", "format": 5}', "is damaged: the key 'run_id' is missing"),
        (
            b'{"kind": "backlight run", "format": 5, "run_id": "x", "attempts": 3}',
            "is damaged: attempts: expected a list, got 3",
        ),
        (
            b'{"kind": "backlight run", "format": 5, "run_id": "x", "attempts": [{}]}',
            "is damaged: attempts.0: the key 'index' is missing",
        ),
        (
            b'{"kind": "backlight run", "format": 5, "run_id": "x",'
            b' "attempts": [{"index": 1%s, "step_offset": 0}]}' % (b"0" * 300),
            "is damaged: attempt 1000",
        ),
        (
            b'{"kind": "backlight run", "format": 5, "run_id": "x",'
            b' "attempts": [{"index": 0, "step_offset": 1%s}]}' % (b"0" * 30),
            "is damaged: attempt 0 with step offset 1000",
        ),
        (
            b'{"kind": "backlight run", "format": 5, "run_id": "x",'
            b' "attempts": [{"index": 0, "step_offset": 0}, {"index": 0, "step_offset": 0}]}',
            "is damaged: two attempts have one number",
        ),
    ],
)
def test_foreign_or_damaged_manifest_is_rejected(run_path: Path, content: bytes, match: str) -> None:
    sealed = seal(content.decode()) if b"format" in content else content
    (run_path / "manifest.json").write_bytes(sealed)
    with pytest.raises(RunFormatError, match=match):
        open_run(run_path)


def test_flipped_digit_of_the_manifest_is_refused(run_path: Path) -> None:
    path = run_path / "manifest.json"
    content = path.read_bytes()
    for field in (b'"step_offset": ', b'"created": 1', b'"world_size": ', b'"scalar": ', b'"step": '):
        at = content.index(field) + len(field)
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(RunFormatError, match=r"manifest\.json: its checksum does not match"):
            open_run(run_path)


def test_directory_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunFormatError, match="there is no such folder; expected a run directory"):
        open_run(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFormatError, match="is a file; expected a run directory"):
        open_run(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFormatError, match="it is empty: no run began in it"):
        open_run(tmp_path / "empty")
    with pytest.raises(RunFormatError, match=r"it has no manifest\.json\); give the folder that --out named"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_invalid_database_is_rejected(run_path: Path, content: bytes) -> None:
    database(run_path).write_bytes(content)
    with pytest.raises(RunFormatError, match="nothing in this run can be read"):
        open_run(run_path)


@pytest.mark.slow
def test_unreadable_attempt_does_not_hide_the_other(run_path: Path, record: Record) -> None:
    record(run_path, 3)
    database(run_path).write_bytes(b"junk" * 1000)
    run = open_run(run_path)
    assert run.series_steps("gradient").tolist() == [STEPS, STEPS + 1, STEPS + 2]
    assert any("rank-00000.db: cannot be read: file is not a database" in loss for loss in run.losses)
    assert any(
        f"lost are 1 rows of parameter_table, 1 rows of scalar_name, {STEPS} rows" in x for x in run.losses
    )


def check_numbers(run: Run, numbers: Callable[..., np.ndarray]) -> int:
    """Check every returned number; return the number of steps."""
    frame = run.frame("gradient", "norm")
    for row, step in enumerate(frame.steps.tolist()):
        assert np.array_equal(frame.values[row], numbers(step)[:, 0])
    return len(frame.steps)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_truncated_database_returns_the_rest_and_reports_the_loss(
    run_path: Path, share: float, numbers: Callable[..., np.ndarray]
) -> None:
    path = database(run_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    try:
        run = open_run(run_path)
    except RunFormatError as error:
        assert "nothing in this run can be read" in str(error)  # noqa: PT017 - either outcome is right
        return
    read_everything(run)
    assert check_numbers(run, numbers) < STEPS
    assert run.losses


@pytest.mark.slow
def test_flipped_bytes_never_give_wrong_numbers(run_path: Path, numbers: Callable[..., np.ndarray]) -> None:
    path = database(run_path)
    data = path.read_bytes()
    source = np.random.default_rng(0)
    returned, rejected, reported = 0, 0, 0
    for _ in range(60):
        broken = bytearray(data)
        for position in source.integers(0, len(data), 20):
            broken[position] ^= int(source.integers(1, 256))
        path.write_bytes(broken)
        try:
            run = open_run(run_path)
        except RunFormatError:
            rejected += 1
            continue
        read_everything(run)
        steps = check_numbers(run, numbers)
        returned += steps
        if steps < STEPS:
            assert run.losses
            reported += 1
    assert returned > 0
    assert reported > 10


def test_damaged_block_is_skipped_and_reported(run_path: Path) -> None:
    damage = "UPDATE series_gradient SET floats = zeroblob(length(floats)) WHERE 7 BETWEEN lowest AND step"
    change(run_path, "UPDATE event SET payload = '{'")
    change(run_path, damage, seal=False)
    run = open_run(run_path)
    assert run.frame("gradient", "norm").steps.tolist() == list(range(BLOCK, STEPS))
    assert run.events() == ()
    assert any(
        f"{BLOCK} of {STEPS} rows of table series_gradient are damaged and left out" in loss
        for loss in run.losses
    )
    assert any("a row of table event is damaged" in loss for loss in run.losses)


@pytest.mark.parametrize(
    ("json_text", "error"),
    [
        ("[{}]", "ValueError: ParameterRecord: 0: the key 'name' is missing"),
        (
            '[{"name": ["x"], "shape": [], "dtype": "f", "device": "c", "numel": 1}]',
            "ValueError: ParameterRecord: 0.name: expected str, got ['x']",
        ),
        (
            '[{"name": "x", "shape": [], "dtype": "f", "device": "c", "numel": 1e400}]',
            "ValueError: ParameterRecord: 0.numel: ",
        ),
        (
            '[{"name": "x", "shape": [], "dtype": "f", "device": "c", "numel": 1,'
            ' "placement": {"offset": ["y"]}}]',
            "ValueError: ParameterRecord: 0.placement.offset.0: ",
        ),
        (
            "[" + ", ".join(['{"name": "x", "shape": [], "dtype": "", "device": "", "numel": 1}'] * 2) + "]",
            "twice",
        ),
    ],
)
def test_rows_without_parameter_table_are_skipped_and_reported(
    run_path: Path, json_text: str, error: str
) -> None:
    change(run_path, ("UPDATE parameter_table SET json = ?", (json_text,)))
    run = open_run(run_path)
    assert run.frame("gradient", "norm").steps.size == 0
    assert any("a row of table parameter_table is damaged" in x and error in x for x in run.losses), (
        run.losses
    )
    assert any(f"{STEPS} of {STEPS} rows of table series_gradient are damaged" in loss for loss in run.losses)
    assert len(run.scalar("loss").steps) == STEPS


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW scalar AS WITH RECURSIVE f(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM f)"
        " SELECT id FROM f",
        "CREATE TABLE scalar (id INTEGER PRIMARY KEY, name, step, value AS (zeroblob(1000000000)))",
    ],
)
def test_foreign_tables_are_not_queried(run_path: Path, statement: str) -> None:
    change(run_path, "DROP TABLE scalar", statement)
    with pytest.raises(RunFormatError, match="its tables scalar are not those of the format"):
        open_run(run_path)


def test_foreign_database_is_rejected(run_path: Path) -> None:
    database(run_path).unlink()
    create = "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
    change(run_path, create, "INSERT INTO meta VALUES ('kind', 'other')")
    with pytest.raises(RunFormatError, match="has kind 'other', expected 'backlight rank database'"):
        open_run(run_path)


def test_flipped_digit_of_a_rank_document_is_a_loss(run_path: Path) -> None:
    path = run_path / "attempt-000" / "rank-00000.json"
    write_document(path, read_document(path) | {"fingerprint": {"seed": 17}})
    assert open_run(run_path).fingerprint() is not None
    path.write_bytes(path.read_bytes().replace(b": 17", b": 16"))
    run = open_run(run_path)
    assert run.fingerprint() is None
    assert [loss for loss in run.losses if "rank-00000.json: its checksum does not match" in loss]
    assert len(run.series_steps("gradient")) == STEPS


def test_damaged_rank_document_loses_only_the_fingerprint(run_path: Path) -> None:
    (run_path / "attempt-000" / "rank-00000.json").write_text('{"fingerprint": {"modules": 3}}')
    run = open_run(run_path)
    assert run.fingerprint() is None
    assert any("rank-00000.json: is damaged: ValueError: Fingerprint: " in loss for loss in run.losses), (
        run.losses
    )
    assert len(run.series_steps("gradient")) == STEPS


def piece(path: Path) -> Path:
    return path / "attempt-000" / "arrays" / "rank-00000-000000.h5"


def test_truncated_piece_loses_only_its_arrays(run_path: Path) -> None:
    data = piece(run_path).read_bytes()
    piece(run_path).write_bytes(data[: len(data) // 2])
    run = open_run(run_path)
    assert run.array_names() == ()
    assert any("cannot be read as a piece of arrays" in loss for loss in run.losses)
    assert any(f"has only {len(data) // 2} of {len(data)} bytes" in loss for loss in run.losses)


def test_flipped_byte_in_an_array_is_detected(run_path: Path) -> None:
    data = bytearray(piece(run_path).read_bytes())
    position = data.index(np.arange(6.0).tobytes())
    data[position + 9] ^= 1
    piece(run_path).write_bytes(data)
    run = open_run(run_path)
    assert run.array("gram")[1] == []
    assert any("checksum of array 'gram' is wrong" in loss for loss in run.losses)


@pytest.mark.slow
def test_unsafe_hdf5_arrays_are_not_read(run_path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["values"] = np.arange(3.0)
    raw = tmp_path / "secret.bin"
    raw.write_bytes(b"x" * 24)

    def external_link(group: h5py.Group) -> None:
        group["values"] = h5py.ExternalLink(str(secret), "/values")

    def soft_link(group: h5py.Group) -> None:
        group["values"] = h5py.SoftLink("/a0/steps")

    def external_storage(group: h5py.Group) -> None:
        group.create_dataset("values", (3,), "f8", external=[(str(raw), 0, 24)])

    def virtual(group: h5py.Group) -> None:
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(secret), "values", (3,))
        group.create_virtual_dataset("values", layout)

    def filtered(group: h5py.Group) -> None:
        group.create_dataset("values", data=np.zeros(3), chunks=(3,), fletcher32=True)

    def swollen(group: h5py.Group) -> None:
        group.create_dataset("values", (3, 10**11), "f8")

    def text(group: h5py.Group) -> None:
        group.create_dataset("values", data=["a", "b", "c"], dtype=h5py.string_dtype())

    for make in (external_link, soft_link, external_storage, virtual, filtered, swollen, text):
        with h5py.File(piece(run_path), "w") as file:
            file.attrs["kind"] = "backlight arrays"
            group = file.create_group("a0")
            group["steps"] = np.arange(3)
            for key, value in {"name": '"x"', "dims": "[]", "unit": '"1"', "dtype": "float64"}.items():
                group.attrs[key] = value
            group.attrs["encoding"], group.attrs["encoding_version"], group.attrs["crc"] = "plain", 1, 0
            make(group)
        with pytest.raises(RunFormatError, match=r"holds no plain numbers|is not stored plainly"):
            list(read_piece(piece(run_path)))
        assert open_run(run_path).array("x")[1] == []


def test_foreign_hdf5_file_is_rejected(run_path: Path) -> None:
    with h5py.File(piece(run_path), "w") as file:
        file["x"] = 1
    with pytest.raises(RunFormatError, match="is HDF5, but not a piece of arrays that backlight wrote"):
        list(read_piece(piece(run_path)))
    with h5py.File(piece(run_path), "w") as file:
        file.attrs["kind"] = "backlight arrays"
        file["a0"] = h5py.SoftLink("/nowhere")
    with pytest.raises(RunFormatError, match="'a0' is a link; backlight writes none"):
        list(read_piece(piece(run_path)))


def test_unknown_encoding_error_names_the_fix(run_path: Path) -> None:
    with h5py.File(piece(run_path), "r+") as file:
        file["a0"].attrs["encoding_version"] = 9
    with pytest.raises(RunFormatError, match=r"encoded as 'plain' version 9, which this release .* Upgrade"):
        open_run(run_path).array("gram")


@pytest.mark.slow
def test_random_manifest_raises_only_run_errors(run_path: Path) -> None:
    original = read_document(run_path / "manifest.json")
    source = np.random.default_rng(1)
    nonsense = [None, -1, 10**30, "x", [], {}, True, 1.5, {"a": {"b": "c"}}, [[1]], "\udcff"]

    def damage(value: object) -> object:
        if isinstance(value, dict):
            key = str(source.choice(sorted(value))) if value else None
            return value if key is None else value | {key: damage(value[key])}
        if isinstance(value, list) and value and source.random() < 0.8:
            return [damage(value[0]), *value[1:]]
        return nonsense[int(source.integers(len(nonsense)))]

    opened = 0
    for _ in range(300):
        write_document(run_path / "manifest.json", damage(original))
        try:
            read_everything(open_run(run_path))
            opened += 1
        except RunFormatError:
            continue
    assert 0 < opened < 300
