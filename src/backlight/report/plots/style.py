"""The look of the pictures: that of the page's light theme, and what their drawers share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from backlight.report.page import ASSETS
from backlight.report.source import Source
from backlight.text import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Source, str, Mapping[str, Any]], "Mapping[str, Figure]"]
"""Source, title and data of a panel → figures by what is added to the panel's name, "" for nothing."""


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


def colours() -> dict[str, str]:
    """Return the colours of the page's light theme by name, so that both show one thing in one colour."""
    sheet = (ASSETS / "page.css").read_text(encoding="utf-8")
    light = sheet[sheet.index(":root {") : sheet.index("}")]
    return dict(re.findall(r"--([a-z0-9-]+):\s*(#[0-9a-f]{6});", light))


def ramp() -> list[str]:
    """Return the colours of the page's heat map from small to large."""
    sheet = (ASSETS / "page.css").read_text(encoding="utf-8")
    match = re.search(r"--ramp:\s*([^;]+);", sheet)
    assert match is not None  # the page could not draw its heat map without it
    return match[1].split()


def tick(value: float, _place: int | None = None) -> str:
    """Return a number as an axis shows it."""
    return number(value) if math.isfinite(value) else ""
