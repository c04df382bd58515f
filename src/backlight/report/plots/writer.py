"""The panels of a report as pictures, SVG and PNG, by matplotlib (the extra ``plots``).

A picture shows what the panel shows on the page, from the same data; what is only words or a table of
them is no picture and is left to the page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backlight import atomic_files
from backlight.registry import warn
from backlight.report.page import rendered
from backlight.report.panel import Drawn, Panel, PanelWarning, failed
from backlight.report.plots.style import styled
from backlight.report.source import Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")

PICTURE_DPI = 150


@dataclass(frozen=True)
class Written:
    """The pictures that were written, and the titles of panels that are no picture."""

    files: tuple[Path, ...]
    words_only: tuple[str, ...]


def write_plots(source: Source, folder: Path, formats: Sequence[str] = FORMATS) -> Written:
    """Write a picture of every panel that has data into ``folder``; an OSError passes through."""
    from backlight.report.plots import panels  # noqa: PLC0415 - needs an optional package

    style = styled()  # before anything is made, for it needs the package
    folder = _prepared(folder)
    files: list[Path] = []
    words_only: list[str] = []
    with style:
        for panel, result in rendered(source):
            draw = panels.DRAWERS.get(result.kind) if isinstance(result, Drawn) else None
            if draw is None or not isinstance(result, Drawn):
                words_only += [panel.title] if isinstance(result, Drawn) else []
                continue
            try:
                for added, figure in draw(source, panel.title, result.data).items():
                    files += _save(panel, added, figure, folder, formats)
            except OSError:
                raise  # a full disk is not the panel's
            except Exception as error:  # noqa: BLE001 - a third-party panel may raise anything
                warn(f"backlight: {failed(panel, error).reason}", PanelWarning)
    return Written(tuple(files), tuple(words_only))


def _prepared(folder: Path) -> Path:
    """Make a folder for pictures; a file of that name is a ValueError."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; --plots takes a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _save(panel: Panel, added: str, figure: Figure, folder: Path, formats: Sequence[str]) -> list[Path]:
    # What is added to the panel's name is made harmless.
    name = f"{panel.name}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', added)}" if added else panel.name
    written = []
    figure.draw_without_rendering()  # lays it out, once for all formats
    figure.set_layout_engine("none")
    for form in formats:
        target = folder / f"{name}.{form}"
        meta = {"Date": None} if form == "svg" else None
        with atomic_files.replacing(target) as temporary, temporary.open("xb") as file:
            figure.savefig(file, format=form, dpi=PICTURE_DPI, metadata=meta)
        written.append(target)
    return written
