"""The live output of a notebook cell: step, loss, gradient norm and findings of a watched run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from backlight import clock
from backlight.monitor import Monitor, RunContext, StoredStep
from backlight.records import Finding
from backlight.session.notebook import notebook_shell

if TYPE_CHECKING:
    from backlight.session.settings import Settings

PERIOD_S = 1.0
"""Seconds between two updates of the cell at least."""


class NotebookMonitor(Monitor):
    """Shows the run below the cell that watches it; nothing is sent but display messages of the kernel."""

    name = "notebook"
    requested_by = None
    records = "the live output of the cell"

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor in a notebook, unless nothing is to be printed."""
        return None if settings.quiet or notebook_shell() is None else cls()

    def attach(self, run: RunContext) -> None:
        """Show the run."""
        import IPython.display  # noqa: PLC0415 - imported by the notebook

        display: Any = IPython.display.display
        self._run = run
        self._scalars = dict[str, float]()
        self._findings: tuple[Finding, ...] = ()
        self._state, self._shown = "running", clock.monotonic()
        self._display: Any = None if run.rank else display(self._content(), raw=True, display_id=True)

    def detach(self, error: BaseException | None) -> None:
        """Note how the run ended."""
        if isinstance(error, KeyboardInterrupt):
            self._state = "interrupted"
        elif error is not None:
            self._state = f"failed with {type(error).__name__}"
        else:
            self._state = "finished"

    def on_step_stored(self, step: StoredStep) -> None:
        """Remember the scalars of the newest step."""
        self._scalars |= {k: v for k, v in step.scalars.items() if k in {"loss", "total_norm"}}

    def on_flush(self) -> None:
        """Update the cell, now and then."""
        if clock.monotonic() - self._shown >= PERIOD_S:
            self._update()

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """Show new findings at once."""
        self._findings = (*self._findings, *findings)
        self._update()

    def on_run_end(self, findings: Sequence[Finding], *, failed: bool) -> None:
        """Show the result."""
        self._findings = tuple(findings)
        self._update()

    def _update(self) -> None:
        self._shown = clock.monotonic()
        if self._display is not None:
            self._display.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        from backlight.report.notebook import live_html  # noqa: PLC0415 - no script needs it

        steps = self._run.clock.done
        text = f"backlight: {self._state}, {self._run.path}"
        page = live_html(self._run.path, self._state, steps, self._scalars, self._findings)
        return {"text/plain": text, "text/html": page}
