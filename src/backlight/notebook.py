"""Notebooks: where a watch runs in one, its name, and the watches that cells start."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any, Protocol


class _Started(Protocol):
    """A watch that was started."""

    def stop(self, error: BaseException | None = None) -> None: ...


def notebook_shell() -> Any:
    """Return the shell of the notebook that runs this process; None in any other one."""
    find: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)  # it may still be importing
    shell = None if find is None else find()
    return shell if type(shell).__name__ in {"ZMQInteractiveShell", "Shell"} else None


def notebook_name() -> str:
    """Return the name of the notebook's file without its ending, ``notebook`` where it is not known."""
    return Path(os.environ.get("JPY_SESSION_NAME", "")).name.removesuffix(".ipynb") or "notebook"


class StartedWatches:
    """The watch that a cell started: another start, and an interrupt of the kernel, close it."""

    def __init__(self) -> None:
        self._watch: weakref.ref[Any] | None = None
        self._follows: Any = None

    def add(self, watch: _Started) -> None:
        """Close the watch that an earlier cell started, and follow this one; nothing outside of notebooks."""
        shell = notebook_shell()
        if shell is None:
            return
        self._close(None)
        self._watch = weakref.ref(watch)
        if self._follows is not shell:
            shell.events.register("post_run_cell", self._after_cell)
            self._follows = shell

    def _after_cell(self, result: Any) -> None:
        error = getattr(result, "error_in_exec", None)
        if isinstance(error, SystemExit):  # Lightning raises it for an interrupt
            error = error.__context__
        if isinstance(error, KeyboardInterrupt):
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        watch = None if self._watch is None else self._watch()
        self._watch = None
        if watch is not None:
            watch.stop(error)


STARTED = StartedWatches()
