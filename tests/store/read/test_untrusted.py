"""Files of a run that others may have placed: refused or left out with a statement, never waited for."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight.store.errors import RunFormatError
from backlight.store.format.arrays import ArrayInfo, Filters, Stack, read_piece, write_piece
from backlight.store.format.manifest import read_document, read_manifest, write_document
from backlight.store.read.run import open_run
from backlight.store.read.run_list import list_runs
from backlight.store.read.snapshot import Snapshot
from backlight.store.write.database import PAGE_BYTES
from backlight.store.write.writer import RunWriter
from backlight.untrusted_files import RefusedFileError, check, read


def written(path: Path, value: float = 1.0) -> Path:
    with RunWriter.create(path, arguments=("--lr", "1")) as writer:
        for step in range(5):
            writer.scalar(step, "loss", value)
        writer.array("weights", 0, np.arange(6.0), dims=("w",))
        writer.evidence("notes.txt", "seen")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link(path: Path) -> None:
    secret = path.parent / "secret"
    secret.write_text("{}")
    path.symlink_to(secret)


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**41)


def foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to act as another user")
    path.write_text("{}")
    os.chown(path, 65534, 65534)


PLANTED = [fifo, device, link, folder, huge, foreign]


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "attempt-000/rank-00000.json",
        "attempt-000/rank-00000.db",
        "attempt-000/rank-00000.db-wal",
        "attempt-000/rank-00000.db-shm",
        "attempt-000/watchdog-x.db",
        "attempt-000/arrays/rank-00000-000000.h5",
        "attempt-000/evidence/notes.txt",
    ],
)
def test_planted_file_is_refused_and_named(name: str, plant: Callable[[Path], None], run: Path) -> None:
    path = run / name
    path.unlink(missing_ok=True)
    plant(path)
    list_runs(run.parent)
    said = ""
    try:
        opened = open_run(run)
        steps = opened.scalar("loss").steps.tolist()
        assert steps in ([], [0, 1, 2, 3, 4])
        opened.array("weights")
        for evidence in opened.evidence():
            opened.read_evidence(evidence)
        said = " ".join(opened.losses)
    except (RunFormatError, RefusedFileError) as error:
        said = str(error)
    except KeyError:
        said = path.name  # the array is not there
    if "evidence" not in name or plant in {huge, foreign}:  # else it is not listed
        assert path.name in said or path.stem in said


def test_file_of_another_run_is_left_out(run: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other", value=2.0)
    name = "attempt-000/rank-00000.db"
    shutil.copy(other / name, run / "attempt-000" / "rank-00001.db")
    opened = open_run(run)
    assert any("rank-00001.db: is of rank 0, its name says 1" in loss for loss in opened.losses)
    assert opened.attempts[0].ranks == (0,)
    shutil.copy(other / name, run / name)
    with pytest.raises(RunFormatError, match=r"rank-00000\.db: belongs to another run"):
        open_run(run)
    assert "belongs to another run" in next(r for r in list_runs(tmp_path) if r.path == run).problem


def test_document_of_another_run_is_left_out(run: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other")
    name = "attempt-000/rank-00000.json"
    document = read_document(other / name)
    document["options"] = {"every": 77}
    write_document(run / name, document)
    opened = open_run(run)
    assert any("rank-00000.json: belongs to another run" in loss for loss in opened.losses)
    assert opened.fingerprint() is None


@pytest.mark.parametrize("keep", [True, False])
def test_manifest_without_its_attempts(keep: bool, run: Path) -> None:
    document = read_document(run / "manifest.json")
    if keep:
        shutil.copytree(run / "attempt-000", run / "attempt-001")
        assert any("attempt-001: manifest.json lists no such" in loss for loss in open_run(run).losses)
    document["attempts"] = []
    write_document(run / "manifest.json", document)
    with pytest.raises(RunFormatError, match="lists no attempt; restore it from a copy"):
        read_manifest(run)


def test_zeros_are_stored_so_that_they_can_be_read(tmp_path: Path) -> None:
    info = ArrayInfo("zeros", (), "float32", "1", "plain", 1)
    stack = Stack(info, np.arange(3), np.zeros((3, 100_000), np.float32))
    write_piece(tmp_path / "rank-00000-000000.h5", [stack], Filters("gzip", 9))
    (found,) = read_piece(tmp_path / "rank-00000-000000.h5")
    assert found.values.shape == (3, 100_000)


@pytest.mark.slow
def test_array_that_grows_beyond_its_bytes_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "rank-00000-000000.h5"
    write_piece(path, [Stack(ArrayInfo("a", (), "float32", "1", "plain", 1), np.arange(1), np.ones((1, 9)))])
    with h5py.File(path, "a") as file:
        del file["a0"]["values"]
        file["a0"].create_dataset("values", data=np.zeros((1, 2_000_000)), compression="gzip", chunks=True)
    with pytest.raises(RunFormatError, match=r"bytes for \d+ in the file"):
        list(read_piece(path))


def test_salvage_reads_a_damaged_table_from_both_ends(run: Path) -> None:
    path = run / "attempt-000" / "rank-00000.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        rows = [(i, i, "kind", "x" * 1000, 0) for i in range(1000, 2000)]
        connection.executemany("INSERT INTO event VALUES (?, NULL, ?, ?, ?, ?)", rows)
    data = bytearray(path.read_bytes())
    places = [match.start() for match in re.finditer(b"kindx", data)]
    page = places[500] // PAGE_BYTES * PAGE_BYTES
    data[page : page + 8] = b"\xff" * 8
    path.write_bytes(data)
    rows = Snapshot(path).salvage("SELECT id FROM event WHERE id >= 1000")
    ids = [i for (i,) in rows]
    assert ids[0] == 1000
    assert ids[-1] == 1999
    assert 1000 - 2 * PAGE_BYTES // 1000 < len(ids) < 1000


def test_reason_of_a_refusal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RefusedFileError, match=r"fifo: it is a FIFO, expected a regular file"):
        check(tmp_path / "fifo", 10)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(RefusedFileError, match=r"large: 11 bytes, expected at most 10"):
        read(tmp_path / "large", 10)
    (tmp_path / "link").symlink_to(tmp_path / "large")
    with pytest.raises(RefusedFileError, match="a symbolic link"):
        read(tmp_path / "link", 100)
    assert read(tmp_path / "link", 100, links=True) == b"x" * 11
    with pytest.raises(RefusedFileError, match="belongs to another user"):
        check(tmp_path / "large", 100, owners={os.geteuid() + 1})
