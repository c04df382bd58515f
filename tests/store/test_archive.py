"""Archives are written atomically, and invalid names are rejected beforehand."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backlight.store.export import Member, check_archive, write_archive


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".zip"])
def test_files_and_texts_share_one_top_directory(ending: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    target = tmp_path / f"all{ending}"
    assert write_archive(target, [("a/b.txt", b"text"), ("c.txt", tmp_path / "file")]) == target
    if ending == ".zip":
        with zipfile.ZipFile(target) as archive:
            found = {name: archive.read(name) for name in archive.namelist()}
    else:
        with tarfile.open(target) as tar:
            found = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    assert found == {"all/a/b.txt": b"text", "all/c.txt": b"a file"}


@pytest.mark.parametrize("ending", [".tar.gz", ".zip"])
def test_error_while_archiving_keeps_the_existing_file(ending: str, tmp_path: Path) -> None:
    def members() -> Iterator[Member]:
        yield "a", b"1"
        raise OSError("gone")

    target = tmp_path / f"all{ending}"
    target.write_bytes(b"before")
    with pytest.raises(OSError, match="gone"):
        write_archive(target, members())
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("all.rar", r"--bundle .*all\.rar: expected a name that ends in \.tar\.gz, \.tgz, \.zip"),
        ("no/all.zip", r"no such folder: .*no$"),
        ("there.zip", r"there\.zip: is a folder; expected the name of a file"),
    ],
)
def test_invalid_archive_name_is_rejected(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "there.zip").mkdir()
    with pytest.raises(ValueError, match=message):
        check_archive(tmp_path / name)
