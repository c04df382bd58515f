"""The panels of a report as pictures, SVG and PNG, by matplotlib (the extra ``plots``).

A picture shows what the panel shows on the page, from the same data; what is only words or a table of
them is no picture and is left to the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backlight.registry import warn
from backlight.report.page import ASSETS, rendered
from backlight.report.panel import Drawn, Panel, PanelWarning, failed
from backlight.report.source import Source
from backlight.text import number, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")

DPI = 150

Draw = Callable[[Source, str, Mapping[str, Any]], "Mapping[str, Figure]"]
"""Source, title and data of a panel → figures by what is added to the panel's name, "" for nothing."""


@dataclass(frozen=True)
class Written:
    """The pictures that were written, and the titles of panels that are no picture."""

    files: tuple[Path, ...]
    words_only: tuple[str, ...]


def write_plots(source: Source, folder: Path, formats: Sequence[str] = FORMATS) -> Written:
    """Write a picture of every panel that has data into ``folder``, which is made where it is missing.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed; the command line names the extra.
    ValueError
        If the folder is a file.
    OSError
        If a picture cannot be written.
    """
    from backlight.report.plots import panels  # noqa: PLC0415 - needs an optional package

    style = styled()  # before anything is made, for it needs the package
    folder = prepared(folder)
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
            except Exception as error:  # noqa: BLE001 - of what somebody else's panel drew
                warn(f"backlight: {failed(panel, error).reason}", PanelWarning)
    return Written(tuple(files), tuple(words_only))


def prepared(folder: Path) -> Path:
    """Make a folder for pictures.

    Raises
    ------
    ValueError
        If it is a file.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; --plots takes a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def styled() -> AbstractContextManager[None]:
    """Give pictures the look of the page while the context lasts."""
    import matplotlib as mpl  # noqa: PLC0415 - an optional package, wanted only here

    style: dict[Any, Any] = {
        "text.parse_math": False,  # a dollar in a name is a dollar
        "svg.fonttype": "none",
        "svg.hashsalt": "backlight",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
    return mpl.rc_context(style)


def file_name(panel: str, added: str) -> str:
    """Return the name of a picture without its ending: what is added to the panel's name made harmless."""
    return f"{panel}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', added)}" if added else panel


def _save(panel: Panel, added: str, figure: Figure, folder: Path, formats: Sequence[str]) -> list[Path]:
    name = file_name(panel.name, added)
    written = []
    figure.draw_without_rendering()  # lays it out, once for all formats
    figure.set_layout_engine("none")
    for form in formats:
        target = folder / f"{name}.{form}"
        meta = {"Date": None} if form == "svg" else None
        figure.savefig(target, format=form, dpi=DPI, metadata=meta)
        written.append(target)
    return written


def colours() -> dict[str, str]:
    """Return the colours of the page's light theme by name, so that both show one thing in one colour."""
    sheet = (ASSETS / "page.css").read_text(encoding="utf-8")
    light = sheet[sheet.index(":root {") : sheet.index("}")]
    return dict(re.findall(r"--([a-z0-9-]+):\s*(#[0-9a-f]{6});", light))


def ramp() -> list[str]:
    """Return the colours of the page's heat map from small to large."""
    sheet = (ASSETS / "page.css").read_text(encoding="utf-8")
    found = re.search(r"--ramp:\s*([^;]+);", sheet)
    assert found is not None  # the page could not draw its heat map without it
    return found[1].split()


def tick(value: float, _place: int | None = None) -> str:
    """Return a number as an axis shows it."""
    return number(value) if math.isfinite(value) else ""


def shortened(name: str, most: int = 40) -> str:
    """Return a name that fits beside an axis, its end kept."""
    text = visible(name)
    return text if len(text) <= most else f"…{text[-(most - 1) :]}"
