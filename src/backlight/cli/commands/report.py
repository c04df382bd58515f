"""``backlight report``: a run, or a matrix, as one offline page or as Markdown."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from backlight.cli.app import command


class Format(enum.StrEnum):
    """Forms of a report."""

    HTML = "html"
    MD = "md"


@command("report", "Runs")
def report(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or the directory of a matrix.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; default RUN/report.html.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Format: html or md.")] = Format.HTML,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="Archive to write instead: FILE.tar.gz or FILE.zip."),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", help="Directory for the charts as SVG and PNG."),
    ] = None,
    animate: Annotated[
        bool,
        typer.Option("--animate", help="Animate spectra by layer, with --plots."),
    ] = False,
) -> None:
    """Write the report of a run or matrix as one offline file.

    A panel that cannot be drawn becomes a sentence, and the exit code is 2.

    Raises
    ------
    ValueError
        If --out and --bundle are both given, the name of the archive is not valid, --plots is given for a
        matrix, or --animate without --plots.
    typer.Exit
        If a panel could not be drawn.
    """
    from backlight.cli.render.panels import report_panel_warnings

    with report_panel_warnings() as failed:
        _written(path, out, form, bundle, plots, animate=animate)
    if failed:
        raise typer.Exit(2)


def _written(
    path: Path, out: Path | None, form: Format, bundle: Path | None, plots: Path | None, *, animate: bool
) -> None:
    if animate and plots is None:
        raise ValueError("report: --animate writes into the folder of --plots; add --plots DIR")
    if bundle is not None:
        from backlight.analysis.report import write_bundle as write_run_bundle
        from backlight.diagnose.matrix.report import is_matrix, write_bundle

        if out is not None:
            raise ValueError(f"report: --out {out} and --bundle {bundle} exclude each other; give one")
        print(write_bundle(path, bundle) if is_matrix(path) else write_run_bundle(path, bundle))
        return
    from backlight.analysis.report import write_html, write_markdown, write_pictures
    from backlight.diagnose.matrix.report import is_matrix, write_report

    target = out if out is not None else path / f"report.{form.value}"
    if is_matrix(path):
        if plots is not None:
            raise ValueError(f"report: {path} is a matrix, which has no pictures; leave out --plots")
        print(write_report(path, target, as_html=form is Format.HTML))
        return
    if plots is not None:
        pictures = write_pictures(path, plots, animate=animate)
    written = write_html(path, target) if form is Format.HTML else write_markdown(path, target)
    print(written)
    if plots is not None:
        for picture in pictures.files:
            print(picture)
        if pictures.words_only:
            print(f"no pictures, but words: {', '.join(pictures.words_only)}", file=sys.stderr)
