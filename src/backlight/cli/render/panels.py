"""Prints one line for each panel that could not be drawn."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from backlight.report.panel import PanelWarning


@contextlib.contextmanager
def report_panel_warnings() -> Iterator[list[str]]:
    """Print each warning about a panel once, as a plain line, and yield the list of them."""
    printed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", PanelWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, PanelWarning):
                others(message, category, *where, **more)
            elif str(message) not in printed:
                printed.append(str(message))
                print(message, file=sys.stderr)

        warnings.showwarning = show
        yield printed
