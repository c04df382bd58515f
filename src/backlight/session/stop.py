"""Ends the run where a finding asks for it, on all ranks at the same step, without a collective."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from backlight import clock, codec
from backlight.capture.hub import UserError
from backlight.capture.training_stop import StopTraining
from backlight.interrupts import is_interrupt
from backlight.monitor import Output, RunHandle
from backlight.records import Finding
from backlight.session.outputs import print_line
from backlight.store.format.schema import STOPPED
from backlight.text import count, visible

if TYPE_CHECKING:
    from backlight.session.settings import Settings


# The step before which all ranks stop together, agreed upon without a collective.
#
# Rank 0 writes it into the store through which the ranks have formed their process group. Ranks that train in
# lockstep see it in time: it lies at least two steps ahead, and no rank is ahead of rank 0 by more than one.

CHECK_STEPS = 8
"""Steps between two looks into the store, which may be on another machine."""

LAST_RANK_TIMEOUT_S = 30.0
"""Seconds that a rank waits for the others before it leaves: a launcher ends the rest when one has left."""

POLL_PERIOD_S = 0.1


class StopAgreement:
    """What the ranks of one process group have agreed on; without a group each rank is on its own.

    ``number`` counts the watches of a process, which all ranks enter in the same order. ``on_error`` is
    called once with what the store raises; this rank is on its own from there on.
    """

    def __init__(self, number: int, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._store: Any = None
        self._is_broken = False
        self._key = f"backlight/stop/{number}"
        self._agreed: tuple[int, Finding] | None = None

    def propose(self, step: int, finding: Finding) -> int:
        """Return the step before which all ranks stop; on rank 0, before ``step``."""
        agreed = (step // CHECK_STEPS + 1) * CHECK_STEPS
        if agreed < step + 2:
            agreed += CHECK_STEPS
        text = json.dumps({"step": agreed, "finding": codec.plain(finding)})
        return step if self._ask("set", self._key, text) is None else agreed

    def finding_at(self, step: int) -> Finding | None:
        """Return the finding on which this rank is to stop before ``step``, None where it goes on."""
        if self._agreed is None and step % CHECK_STEPS == 0 and self._ask("check", [self._key]):
            agreed = json.loads(self._ask("get", self._key) or "null")
            if agreed is not None:
                self._agreed = agreed["step"], codec.convert(agreed["finding"], Finding)
        return self._agreed[1] if self._agreed is not None and step >= self._agreed[0] else None

    def wait_for_others(self, world_size: int) -> None:
        """Wait until all ranks have come here, up to a limit."""
        left, end = f"{self._key}/left", clock.monotonic() + LAST_RANK_TIMEOUT_S
        count = self._ask("add", left, 1)
        while count is not None and count < world_size and clock.monotonic() < end:
            clock.sleep(POLL_PERIOD_S)
            count = self._ask("add", left, 0)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store; None where there is none, or it fails."""
        if self._is_broken:
            return None
        try:
            if self._store is None:
                if not (dist.is_available() and dist.is_initialized()):
                    return None  # the script may form its process group late
                # Private, and the only way to the store of an existing group.
                self._store = dist.distributed_c10d._get_default_store()
            answer = getattr(self._store, method)(*arguments)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._is_broken = True
            self._on_error(error)
            return None
        return True if answer is None else answer


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


class StopOutput(Output):
    """Ends the run on the first error or warning that ``stop_on`` names; all ranks before the same step.

    Under ``watch``, ``on_stop`` is called, then :class:`StopTraining` raised. A script that a command runs
    gets the signal that it handles, SIGTERM or else SIGINT; where it handles none, a KeyboardInterrupt.
    """

    name = "stop"
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

    def attach(self, run: RunHandle) -> None:
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
