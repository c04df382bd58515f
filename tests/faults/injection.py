"""Injected faults as data, and what the scripts that inject them share."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backlight.diagnose.script_observer import ScriptObserver
    from backlight.records import Finding

Train = Callable[[bool], None]


@dataclass(frozen=True)
class Fault:
    """A training function with a fault that its argument injects.

    ``expected`` is what a command must report; the line is the one marked ``# HERE`` in the source.
    """

    name: str
    train: Train
    expected: dict[str, object]

    @property
    def line(self) -> int | None:
        """Number of the marked line in its file, None where no line is marked."""
        lines, first = inspect.getsourcelines(self.train)
        marked = [first + n for n, text in enumerate(lines) if "# HERE" in text]
        return marked[0] if marked else None


def registrar(table: dict[str, Fault]) -> Callable[..., Callable[[Train], Train]]:
    """Return a decorator that adds training functions to ``table``."""

    def fault(**expected: object) -> Callable[[Train], Train]:
        def decorate(train: Train) -> Train:
            table[train.__name__] = Fault(train.__name__, train, expected)
            return train

        return decorate

    return fault


def text_of(finding: Finding) -> str:
    """Return what a reader gets to see of the object of a finding."""
    subject = finding.subject
    parts = (finding.title, finding.detail, subject.parameter, subject.module, subject.line)
    return " ".join(str(part) for part in (*parts, *(one.value for one in finding.evidence)))


class Ended(BaseException):
    """Ends a script that has been observed for long enough."""


def end() -> None:
    """End the script from within."""
    raise Ended


def run_under(observer: ScriptObserver, train: Train, injected: bool) -> None:
    """Run a training function under an observer until it ends, or backward fails."""
    with observer, contextlib.suppress(Ended, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(injected)
    assert not observer.notes


def wait_for_watchdog(timeout_s: float = 60.0) -> None:
    """Wait until the watchdog process of this rank runs: on a busy machine its start takes seconds."""
    from backlight.watchdog import runtime_dir
    from backlight.watchdog.shared_state import RankStatus, read_state

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for directory in runtime_dir.runtime_directories():
            states = [
                read_state(runtime_dir.state_path(directory, r)) for r in runtime_dir.ranks_in(directory)
            ]
            running = [s for s in states if s is not None and s.status is RankStatus.RUNNING]
            is_own = any(state.pid == os.getpid() for state in running)
            if is_own and runtime_dir.watchdog_pid(directory):
                time.sleep(0.5)  # until it has opened the process
                return
        time.sleep(0.05)
