"""``backlight report``: a run, or a matrix, as one offline page or as Markdown."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class Format(enum.StrEnum):
    """Forms of a report."""

    HTML = "html"
    MD = "md"


def report(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, or that of a matrix.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; without it RUN/report.html.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="html, or md for a ticket.")] = Format.HTML,
) -> None:
    """Write one HTML file that works offline, and print its path."""
    from backlight.session.reporting import write_html, write_markdown
    from backlight.stalls.matrix.folder import is_matrix
    from backlight.stalls.matrix.rendering.bundle import write_form

    target = out if out is not None else path / f"report.{form.value}"
    if is_matrix(path):
        print(write_form(path, target, as_html=form is Format.HTML))
        return
    written = write_html(path, target) if form is Format.HTML else write_markdown(path, target)
    print(written)


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("report")(report)
