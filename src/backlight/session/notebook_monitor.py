"""The live output of a notebook cell: step, loss, gradient norm and findings of a watched run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from backlight import clock
from backlight.findings.losses import loss_labels
from backlight.monitor import Monitor, RunContext, StoredStep
from backlight.notebook import notebook_shell
from backlight.records import Finding
from backlight.session.run_directory import ended_run

if TYPE_CHECKING:
    from backlight.session.settings import Settings

PERIOD_S = 1.0
"""Seconds between two updates of the cell at least."""


class NotebookMonitor(Monitor):
    """Shows the run below the cell that watches it; nothing is sent but display messages of the kernel."""

    name = "notebook"
    requested_by = None
    records = "the live output of the cell"
    order = 20  # at the end after the last new findings

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor in a notebook, unless nothing is to be printed."""
        return None if settings.quiet or notebook_shell() is None else cls()

    def attach(self, run: RunContext) -> None:
        """Show the run."""
        self._run = run
        self._scalars: dict[str, tuple[int, float]] = {}
        self._findings: tuple[Finding, ...] = ()
        self._state, self._shown = "running", clock.monotonic()
        self._display: Any = None
        self._cell, self._is_cleared, self._lacks = "", False, ""
        if run.rank:
            return
        import IPython.display  # noqa: PLC0415 - imported by the notebook

        make: Any = IPython.display.DisplayHandle
        self._publisher = notebook_shell().display_pub
        self._publisher.register_hook(self._follow)
        self._display = make()
        self._show()

    def detach(self, error: BaseException | None) -> None:
        """Note how the run ended."""
        if isinstance(error, KeyboardInterrupt):
            self._state = "interrupted"
        elif error is not None:
            self._state = f"failed with {type(error).__name__}"
        else:
            self._state = "finished"

    def on_step_stored(self, step: StoredStep) -> None:
        """Remember losses and norm of the newest step."""
        self._scalars.pop("losses", None)
        self.on_step_scalars(step.step, step.scalars)

    def on_step_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Remember the losses of a step that is not recorded."""
        for name, value in values.items():
            if name in {"total_norm", "losses"} or name.partition("/")[0] == "loss":
                self._scalars[name] = step, value

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
        from backlight.report.verdict import lacking  # noqa: PLC0415 - no script needs it

        self._findings = tuple(findings)
        self._lacks = lacking(ended_run(self._run.writer, failed=failed))
        if self._is_cleared:
            self._show()
        self._update()
        if self._display is not None:
            self._publisher.unregister_hook(self._follow)

    def _follow(self, message: dict[str, Any]) -> dict[str, Any]:
        """Show the run anew where the user's code has cleared its output, which drops all updates.

        A front end may wait with clearing until the next output. That has to be one of the user's code.
        """
        kind, cell = message["header"]["msg_type"], message["parent_header"].get("msg_id", "")
        if kind == "display_data":
            if message["content"]["transient"].get("display_id") == self._display.display_id:
                self._cell, self._is_cleared = cell, False
            elif self._is_cleared and cell == self._cell:
                with self._run.notifier.shield():
                    self._show()
        elif kind == "clear_output" and cell == self._cell:
            self._is_cleared = True
        return message

    def _show(self) -> None:
        self._display.display(self._content(), raw=True)

    def _update(self) -> None:
        self._shown = clock.monotonic()
        if self._display is not None:
            self._display.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        from backlight.report.notebook import live_cell  # noqa: PLC0415 - no script needs it

        steps = max(self._run.clock.done, 0)
        return live_cell(self._run.path, self._state, steps, self._figures(), self._findings, self._lacks)

    def _figures(self) -> dict[str, tuple[int, float]]:
        """Return losses and gradient norm by what they are called, each with its step."""
        known = dict(self._scalars)
        losses = known.pop("losses", None)
        labels = {"loss": "loss" if losses is None else f"sum of {losses[1]:.0f} losses"}
        own = [name for name in known if name.startswith("loss/")]
        if len(own) > 1:
            scope = self._run.scope
            kinds = [type(optimizer).__name__ for optimizer in scope.optimizers()]
            labels = dict(loss_labels(own, scope.table.records, kinds))
        labels["total_norm"] = "gradient norm"
        return {label: known[name] for name, label in labels.items() if name in known}
