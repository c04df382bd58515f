"""Panels that could not be drawn, told by a command: one line each, and an exit code that says so."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from backlight.report.panel import PanelWarning


@contextlib.contextmanager
def panels_told() -> Iterator[list[str]]:
    """Print what is warned of panels, each once and as a plain line, and yield the list of it."""
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", PanelWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, PanelWarning):
                others(message, category, *where, **more)
            elif str(message) not in told:
                told.append(str(message))
                print(message, file=sys.stderr)

        warnings.showwarning = show
        yield told
