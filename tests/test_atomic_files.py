"""Files are written whole or not at all, and a name that was guessed is refused instead of followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backlight import atomic_files
from backlight.experiments.checkpoints import save
from backlight.report.page import write_page
from backlight.store.errors import ExportError
from backlight.store.export import export, write_archive, write_arrays
from backlight.store.format.arrays import ArrayInfo, Stack, write_piece
from backlight.store.format.manifest import write_document
from backlight.store.read.run import open_run
from backlight.store.write.database import RankDatabase
from run_builder import build_run


def stack() -> Stack:
    info = ArrayInfo("w", ("w",), "float32", "1", "plain", 1)
    return Stack(info, np.zeros(1, np.int64), np.zeros((1, 2), np.float32))


def run(path: Path) -> Path:
    return build_run(path.with_name("run"), scalars={"loss": [1.0]}).path


WRITERS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: atomic_files.write(path, b"new"),
    "copy": lambda path: atomic_files.copy(Path(__file__), path),
    "document": lambda path: write_document(path, {"a": 1}),
    "page": lambda path: write_page("new", path),
    "archive.zip": lambda path: write_archive(path, [("a", b"new")]),
    "archive.tar.gz": lambda path: write_archive(path, [("a", b"new")]),
    "piece.h5": lambda path: write_piece(path, [stack()]),
    "arrays.h5": lambda path: write_arrays(path, {"w": (np.zeros(2), ("w",), "1")}, overwrite=True),
    "database": lambda path: RankDatabase(path, {}).close(),
    "checkpoint": lambda path: save(path.parent, 7, {}),
    "table.csv": lambda path: export(open_run(path.parent / "run"), path, "scalars", overwrite=True),
    "table.parquet": lambda path: export(open_run(path.parent / "run"), path, "scalars", overwrite=True),
    "run.h5": lambda path: export(open_run(path.parent / "run"), path, overwrite=True),
}


def target_of(name: str, folder: Path) -> Path:
    return folder / ("step-000000007.pt" if name == "checkpoint" else name)


@pytest.mark.parametrize("name", WRITERS)
def test_link_under_the_name_is_replaced(name: str, tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", target_of(name, tmp_path)
    run(target)
    victim.write_text("private")
    victim.chmod(0o600)
    target.symlink_to(victim)
    WRITERS[name](target)
    assert victim.read_text() == "private"
    assert stat.S_ISREG(target.lstat().st_mode)


@pytest.mark.parametrize("name", WRITERS)
def test_guessed_temporary_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, target = tmp_path / "victim", target_of(name, tmp_path)
    run(target)
    victim.write_text("private")
    monkeypatch.setattr(os, "urandom", bytes)  # as if the name could be guessed
    atomic_files.temporary_name(target).symlink_to(victim)
    with pytest.raises((OSError, ExportError), match=r"exists|unable to open file"):
        WRITERS[name](target)
    assert victim.read_text() == "private"


def test_temporary_names_are_not_repeated_and_fit(tmp_path: Path) -> None:
    path = tmp_path / ("\u20ac" * 85)  # 255 bytes, the most that file systems take
    names = {atomic_files.temporary_name(path).name for _ in range(100)}
    assert len(names) == 100
    assert all(atomic_files.is_temporary(name) and len(os.fsencode(name)) <= 255 for name in names)


def test_permissions_of_a_file_are_those_asked_for_from_its_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    monkeypatch.setattr(atomic_files, "sync_file", lambda path: modes.append(path.stat().st_mode & 0o777))
    atomic_files.write(tmp_path / "script", b"new", 0o700)
    assert modes == [0o700]


def test_log_is_appended_to_and_no_link_is_followed(tmp_path: Path) -> None:
    for text in (b"a", b"b"):
        with atomic_files.open_log(tmp_path / "log") as log:
            log.write(text)
    assert (tmp_path / "log").read_bytes() == b"ab"
    (tmp_path / "link").symlink_to(tmp_path / "log")
    with pytest.raises(OSError, match="symbolic links"):
        atomic_files.open_log(tmp_path / "link")


def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    atomic_files.write(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
