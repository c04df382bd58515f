"""Ends the run where a finding asks for it: before a step, after a chance to save a checkpoint."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from backlight.capture.hub import UserError
from backlight.capture.stop_training import StopTraining
from backlight.monitor import Monitor, RunContext
from backlight.records import Finding
from backlight.session.print_monitor import print_line
from backlight.session.stop_agreement import StopAgreement
from backlight.store.format.schema import STOPPED
from backlight.text import count, visible

if TYPE_CHECKING:
    from backlight.session.settings import Settings

STOP_EXIT_CODE = 79
"""Exit code of a process that a finding ended; the first one that sysexits.h leaves free."""

STEPS_AFTER_SIGNAL = 10
"""Steps that a script may take after its handler of a signal has returned, before the run is ended."""


def exit_code(rank: int) -> int:
    """Return the exit code of a rank that a finding ended: a launcher ends the others once one has failed."""
    return 0 if rank else STOP_EXIT_CODE


_numbers = itertools.count()


class InterruptTraining(StopTraining, KeyboardInterrupt):
    """Ends a script that does not handle SIGTERM; one that handles Ctrl-C saves what it saves then."""


class StopMonitor(Monitor):
    """Ends the run on the first error or warning that ``stop_on`` names; all ranks before the same step.

    Under ``watch``, ``on_stop`` is called, then :class:`StopTraining` raised. A script that a command runs
    gets the signal that it handles, SIGTERM or else SIGINT; where it handles none, a KeyboardInterrupt.
    """

    name = "stop"
    requested_by = None
    records = "stop_on"

    def __init__(self, is_named: Callable[[Finding], bool], on_stop: Callable[[Finding], Any] | None) -> None:
        self._is_named, self._on_stop = is_named, on_stop
        self._is_script = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor where findings are named; ValueError where a name is unknown."""
        if not settings.stop_on:
            return None
        return cls(settings.stops_on(), settings.on_stop)

    def check_process(self, *, is_script: bool) -> None:
        """Remember whether a command runs the script."""
        self._is_script = is_script

    def attach(self, run: RunContext) -> None:
        """On other ranks than 0, begin to look for what rank 0 decides."""
        self._run, self._stream = run, sys.stderr
        self._agreement = StopAgreement(
            next(_numbers), lambda error: run.notifier.trouble(error, "stop_on on all ranks", is_data=False)
        )
        self._finding: Finding | None = None
        self._stop_step: int | None = None
        if run.rank:
            run.before_steps(self._before_step)

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """Request the end, once."""
        named = [f for f in findings if not f.is_hint and self._is_named(f)]
        if named and self._finding is None:
            self._finding = named[0]
            self._run.before_steps(self._before_step)

    def on_run_end(self, findings: Sequence[Finding], *, failed: bool) -> None:
        """Wait for the other ranks: a launcher ends them once one has left, and they may still save."""
        if self._stop_step is not None and self._run.clock.done >= self._stop_step:
            self._agreement.wait_for_others(self._run.world_size)

    def _before_step(self) -> None:
        step = self._run.clock.done
        if self._finding is None:
            self._finding = self._agreement.finding_at(step)
            self._stop_step = None if self._finding is None else step
        elif self._stop_step is None:
            self._stop_step = self._agreement.propose(step, self._finding)
        if self._finding is None or self._stop_step is None or step < self._stop_step:
            return
        if step == self._stop_step:
            self._begin_stop(self._finding)
        if not self._is_script or step >= self._stop_step + STEPS_AFTER_SIGNAL:
            raise StopTraining(exit_code(self._run.rank), self._finding)

    def _begin_stop(self, finding: Finding) -> None:
        run = self._run
        run.stopped(finding)
        run.writer.event(run.clock.index, STOPPED, {"rule": finding.rule, "title": finding.title})
        if not run.rank:
            steps = count(run.clock.done + run.writer.step_offset, "step")
            print_line(f"stopping after {steps} ({visible(finding.rule)})", self._stream)
        try:
            self._announce(finding)
        except Exception as error:
            raise UserError(error) from error

    def _announce(self, finding: Finding) -> None:
        if self._on_stop is not None:
            self._on_stop(finding)
        if not self._is_script:
            return
        if callable(signal.getsignal(signal.SIGTERM)):
            signal.raise_signal(signal.SIGTERM)
        elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise InterruptTraining(exit_code(self._run.rank), finding)
        elif callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        else:
            raise StopTraining(exit_code(self._run.rank), finding)
