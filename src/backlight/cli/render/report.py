"""Prints the findings after a watched script, and one line for each panel that could not be drawn."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backlight.records import Finding
from backlight.report.panel import PanelWarning
from backlight.standard_error import write_text
from backlight.store.format.manifest import Progress
from backlight.terminal import write


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
                write(message, file=sys.stderr)

        warnings.showwarning = show
        yield printed


def after_run(path: Path, found: Sequence[Finding] | None = None, progress: Progress | None = None) -> None:
    """Print the summary of the run in ``path`` on standard error.

    ``found`` are findings that this process has just made itself, ``progress`` is as for
    :func:`backlight.store.read.run.open_run`.
    """
    from backlight.report.terminal import summary_text

    write_text(summary_text(path, found, progress), sys.stderr)
