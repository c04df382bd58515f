"""Everything that is attached to a process while a run is recorded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backlight import clock
from backlight.capture.forward import ScopeForwards
from backlight.capture.hub import HUB, NextEvent
from backlight.devices import has_async_copies
from backlight.findings.accepted import mark_accepted
from backlight.measure.transfer import first_number, start_copy
from backlight.monitor import RunHandle, Samples
from backlight.notifier import Notifier
from backlight.records import UNMEASURED, Finding, RunStatus
from backlight.session.monitor_set import MonitorSet
from backlight.session.run_directory import final_findings, holds_nothing, why_no_step
from backlight.session.sampling import Sampling, StepSelection
from backlight.session.script_end import description, summary_of
from backlight.session.settings import Settings
from backlight.session.step_recorder import StepRecorder
from backlight.session.writer_thread import STOP_TIMEOUT_S, ResultQueue, WriterThread
from backlight.store.format.schema import COST, EXCEPTION
from backlight.threads import running_user_code

if TYPE_CHECKING:
    from backlight.capture.parameters import Scope
    from backlight.store.write.writer import RunWriter


HURRIED_TIMEOUT_S = 0.5
"""Seconds that the writer thread has to end after a second Ctrl-C."""


class AttachedRun:
    """The parts of a watch, composed by :meth:`attach` and taken apart in reverse order by :meth:`close`.

    Attributes
    ----------
    found:
        The findings at the end; None before, and where they were not evaluated.
    stopped_by:
        The finding that ended the run by ``stop_on``; None for any other end.
    is_abandoned:
        Whether nothing is recorded any more: an internal error, or a training run that was refused.
    refusal, removed:
        Why this training run was refused; why the run of a script without training was removed. Else empty.
    """

    def __init__(
        self,
        settings: Settings,
        writer: RunWriter,
        monitors: MonitorSet,
        notifier: Notifier,
        scope: Scope,
        *,
        is_script: bool,
    ) -> None:
        self.settings, self.monitors = settings, monitors
        self.writer, self.notifier = writer, notifier
        self._pid = os.getpid()
        self._stack = contextlib.ExitStack()
        self._error: BaseException | None = None
        self._is_hurried, self._ending = False, ""
        self.is_abandoned = False
        self.refusal = self.removed = ""
        self._is_script = is_script
        # A script that has not begun has none.
        self._finds_optimizers = not scope.has_optimizers and not is_script
        self._alarmed = self._attended = -1
        self._attention_rest = settings.detail
        self.findings: list[Finding] | None = None
        self.stopped_by: Finding | None = None
        self.sampling = Sampling(settings.every)
        self.recorder = StepRecorder(scope, self.sampling, monitors, notifier, max_steps=settings.steps)
        notifier.clock = self.recorder
        self.scope, self._forwards, self.results = scope, ScopeForwards(scope), ResultQueue()
        self.thread = WriterThread(
            self.recorder,
            self.results,
            monitors,
            writer,
            settings.flush_interval,
            notifier.trouble,
            # Who gives a spacing has decided how much is stored.
            StepSelection() if settings.every is None else None,
        )
        self.recorder.on_backlog = self.thread.flush_soon
        monitors.account(self.thread)
        if "health" in settings.monitors:
            self.recorder.scalars.on_leap = self._attend

    def attach(self, samples: Samples | None, arguments: tuple[str, ...]) -> None:
        """Attach every part; what raises leaves the parts before it to :meth:`abandon`."""
        # Last: the file is closed when nothing writes to it any more.
        self._on_exit(self._finish)
        # Before the end is evaluated, every step that was handed over has to be in the store.
        self.thread.start()
        self._on_exit(lambda: self.thread.stop(HURRIED_TIMEOUT_S if self._is_hurried else STOP_TIMEOUT_S))
        # First in the hub: at an event that ends a step, the recorder closes it before any monitor counts the
        # event to the next one.
        HUB.add(self.recorder, self.notifier.trouble)
        self._on_exit(lambda: HUB.remove(self.recorder))
        if self._finds_optimizers:
            HUB.optimizers.scan()
        self._on_exit(self._forwards.stop)
        # While the writer thread runs: what a monitor has left is stored by it.
        self._on_exit(self.recorder.release, lambda: self.monitors.detach(self._error))
        self.monitors.attach(lambda monitor: RunHandle(self, monitor, samples, arguments))
        # Monitors see the start of step 0 and the end of the last step: the recorder starts after them and
        # stops first.
        self._on_exit(self._report_threads, self.recorder.finish)
        self.recorder.start()

    def close(self, error: BaseException | None) -> bool:
        """Detach everything, evaluate the rules and close the run; False in a forked child.

        A child inherits the parts, but neither its threads nor its files.
        """
        if os.getpid() != self._pid:
            return False
        self._error = error
        self._ended = clock.perf_counter()
        try:
            self._stack.close()
        finally:
            self._error = None  # its traceback holds the variables of the script
        return True

    def abandon(self) -> None:
        """Detach what is attached, and close the run as failed without an evaluation."""
        self.is_abandoned = True
        self._stack.close()

    @property
    def not_kept(self) -> str:
        """Why the run directory does not hold this training run; empty where it does."""
        return self.removed or self.refusal

    def log(self, numbers: dict[str, Any]) -> None:
        """Store numbers of the user's with the last completed step.

        A tensor is copied behind the work of the current stream, which may be one of the script's own.
        """
        on_their_way = {
            name: start_copy(first_number(value))
            if isinstance(value, torch.Tensor) and has_async_copies(value.device)
            else value
            for name, value in numbers.items()
        }
        self.recorder.logged.append((max(self.recorder.done - 1, 0), on_their_way))

    def record_cost(self, part: str, seconds: float) -> None:
        """Record the seconds that the start or the end of the watch took."""
        self.notifier.event(COST, {"part": part, "seconds": seconds})

    def _on_exit(self, *calls: Callable[[], object]) -> None:
        def leave() -> None:
            try:
                for call in calls:
                    with self.notifier.shield():
                        call()
            except BaseException:  # a second Ctrl-C: what is left is done without waiting for anything
                self._is_hurried = True
                raise

        self._stack.callback(leave)

    # While it runs

    def follow_forwards(self) -> None:
        """Follow the calls of the outermost modules."""
        self._forwards.start(lambda error: self.notifier.trouble(error, "when a forward begins and ends"))

    def deliver(self, findings: Sequence[Finding]) -> None:
        """Call ``on_new_findings`` of every monitor and output."""
        with running_user_code():
            self.monitors.call("on_new_findings", mark_accepted(findings))

    def refuse(self, reason: str) -> None:
        """Stop watching; the attempt is removed once everything is detached."""
        self.refusal, self.is_abandoned = reason, True
        self.notifier.warn("refused", f"{reason}. This training is not watched")
        # Not inside this event, which other listeners still wait for.
        ending = NextEvent(self._stack.close)
        self._stack.callback(HUB.remove, ending)
        HUB.add(ending, self.notifier.trouble)

    def _attend(self, step: int) -> None:
        """Record in detail from the next step on, before the alarm, which the writer thread may raise.

        The rest until the next time doubles: losses that leap all the time cost no more than a few times.
        """
        if step > self._attended:
            self._attended = step + self._attention_rest
            self._attention_rest *= 2
            self.sampling.detail(step, self.settings.detail)
            HUB.resume_soon()
            self.thread.flush_soon()

    def alarm(self, step: int, cause: str) -> None:
        """Record the next steps in detail, and report the alarm to every monitor."""
        if step > self._alarmed:
            self._alarmed = step + self.settings.detail
            self.sampling.detail(self.recorder.index, self.settings.detail)
            HUB.resume_soon()
            self.notifier.event("detail", {"steps": self.settings.detail, "cause": cause}, step)
        self.monitors.call("on_alarm", step, cause)

    def fact(self, rule: str, kind: str) -> None:
        """Have ``rule`` evaluated as soon as what was recorded is on disk."""
        self.monitors.call("on_fact", rule, kind)
        self.thread.flush_soon()

    # At the end

    def _report_threads(self) -> None:
        """Record what was trained and not recorded: by other threads, and after this end."""
        HUB.training.end()
        # What watches a whole script holds every optimizer, those included that exist no more.
        others = [reference() for reference in HUB.training.missed]
        if any(self._is_script if other is None else self.scope.covers(other) for other in others):
            what = "optimizer steps of another thread"
            self._lack(what, "one thread is recorded", f"{what} were not recorded")
        if HUB.training.goes_on():
            reason = "recording ended while the thread that trains went on"
            self._lack("what followed", reason, reason)

    def _lack(self, what: str, reason: str, lacks: str) -> None:
        self.notifier.event(UNMEASURED, {"what": what, "reason": reason, "lacks": lacks}, self.recorder.index)

    def _finish(self) -> None:
        """Evaluate the rules on what is stored, and close the run."""
        writer = self.writer
        if self.is_abandoned:
            if self.refusal:
                self.monitors.call("on_run_end", [], failed=True)
                writer.discard()
            writer.close(RunStatus.FAILED)
            return
        failed = self._error is not None or self.stopped_by is not None
        try:
            with self.notifier.shield():
                self._record_error()
            if not self._is_hurried:
                self._evaluate(failed=failed)
        finally:
            writer.close(RunStatus.FAILED if failed else RunStatus.FINISHED)

    def _record_error(self) -> None:
        if self._error is not None:
            payload = description(self._error, self.settings.redact)
            self._ending = summary_of(self._error, payload["line"])
            self.writer.event(self.recorder.index, EXCEPTION, payload)

    def _evaluate(self, *, failed: bool) -> None:
        writer = self.writer
        with self.notifier.shield():
            self.monitors.call("on_all_stored", failed=failed)
            if nothing := why_no_step(self.recorder, self.scope, self._ending):
                self.notifier.unmeasured("gradient", nothing)
                # A crash in the first backward is what the run was made for.
                is_crash = self._error is not None and self.recorder.backwards
                if self._is_script and not is_crash and holds_nothing(writer):
                    self.removed = nothing
            writer.flush_all()
            if writer.lost is None and not self.removed:
                self.findings = final_findings(writer, failed=failed)
        self.monitors.call("on_run_end", mark_accepted(self.findings or []), failed=failed)
        if self.removed:
            writer.discard()  # then closing it does nothing
        self.record_cost("end", clock.perf_counter() - self._ended)
