"""The whole matrix as one archive: report, plan and every file of evidence."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from backlight.stalls.matrix.rendering.markdown import render_markdown
from backlight.stalls.matrix.rendering.page import render_html

ENDINGS = (".tar.gz", ".tgz", ".zip")


def check_bundle(target: Path) -> None:
    """Check the name of an archive, before a matrix runs for it.

    Raises
    ------
    ValueError
        If its ending is none of :data:`ENDINGS`, or its folder does not exist.
    """
    if not target.name.endswith(ENDINGS):
        raise ValueError(f"--bundle {target}: expected a name that ends in {', '.join(ENDINGS)}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"--bundle {target}: no such folder: {target.absolute().parent}")


def write_reports(folder: Path) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.html`` into the folder of a matrix and return their paths."""
    text = write_form(folder, folder / "report.md", as_html=False)
    return text, write_form(folder, folder / "report.html", as_html=True)


def write_form(folder: Path, target: Path, *, as_html: bool) -> Path:
    """Write the report of the matrix in ``folder`` to ``target``, whole or not at all, and return it.

    Raises
    ------
    MatrixFolderError
        If the folder holds no report.
    """
    text = render_html(folder) if as_html else render_markdown(folder)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def write_bundle(folder: Path, target: Path) -> Path:
    """Pack the folder of a matrix into ``target``, whole or not at all; links are left out.

    Raises
    ------
    ValueError
        If the name's ending is unknown.
    """
    check_bundle(target)
    write_reports(folder)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    root = target.name[: -len(next(e for e in ENDINGS if target.name.endswith(e)))] or "matrix"
    try:
        if target.name.endswith(".zip"):
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
                for path in _files(folder, temporary, target):
                    archive.write(path, f"{root}/{path.relative_to(folder).as_posix()}")
        else:
            with tarfile.open(temporary, "w:gz") as tar:
                for path in _files(folder, temporary, target):
                    tar.add(path, f"{root}/{path.relative_to(folder).as_posix()}", recursive=False)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _files(folder: Path, *without: Path) -> Iterator[Path]:
    skipped = {path.absolute() for path in without}
    for path in sorted(folder.rglob("*")):
        plain = path.is_file() and not path.is_symlink()
        if (
            plain
            and path.absolute() not in skipped
            and path.name != ".lock"
            and not path.name.endswith(".tmp")
        ):
            yield path
