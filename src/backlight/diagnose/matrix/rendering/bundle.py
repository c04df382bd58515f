"""The whole matrix as one archive: report, plan and every file of evidence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from backlight.diagnose.matrix.rendering.markdown import render_markdown
from backlight.diagnose.matrix.rendering.page import render_html
from backlight.store.export.archive import check_archive, write_archive


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

    A name that is not one of an archive raises what :func:`backlight.store.export.archive.check_archive`
    raises.
    """
    check_archive(target)
    write_reports(folder)
    return write_archive(
        target, ((path.relative_to(folder).as_posix(), path) for path in _files(folder, target))
    )


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
