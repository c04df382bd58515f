"""``watch``: attach the monitors to a training run, and record it in a run directory."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from backlight.capture.forward import ScopeForwards
from backlight.capture.hub import HUB, NextEvent, underlying
from backlight.capture.parameters import Scope, build_table
from backlight.capture.steps import StepTracker, StopTraining
from backlight.distributed import rank_and_size
from backlight.findings.evaluate import Findings, NoFindings, findings_of
from backlight.monitor import Monitor, RunContext, Samples, Timed, check_monitors
from backlight.notifier import Notifier
from backlight.records import Finding, RunStatus
from backlight.session.arguments import check_samples, listed, loggable
from backlight.session.closing_line import print_result
from backlight.session.monitor_set import MonitorSet, check_use_of_samples, requested_monitors
from backlight.session.run_directory import (
    chosen_path,
    final_findings,
    holds_nothing,
    open_writer,
    why_no_step,
)
from backlight.session.script_end import failure, uncaught_exception
from backlight.session.settings import DEFAULT_MONITORS, Settings, given_settings, suggest_keywords
from backlight.session.step_recorder import Sampling, StepRecorder
from backlight.session.writer_thread import ResultQueue, WriterThread
from backlight.store.format.schema import COST, EXCEPTION
from backlight.store.read.run import open_run
from backlight.text import count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backlight.monitors.grokking.model.measures import Measures
    from backlight.monitors.spectra.model.options import SpectraOptions
    from backlight.session.settings import OnFinding
    from backlight.store.write.writer import RunWriter

__all__ = ["StopTraining", "Watch", "watch"]

HOW_TO_START = (
    "write `with backlight.watch(...) as watch:` around the training loop, or "
    "`watch = backlight.watch(...).start()` before it"
)


class Watch:
    """One watched training run; made by :func:`watch`, used as a context manager or by start and stop.

    Attributes
    ----------
    path:
        The run directory, once entered.
    stopped_by:
        The finding that ended the run by ``stop_on``; None for any other end.
    removed:
        Why the run directory was removed: a script that ended before its training, and left nothing to read.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        settings: Settings,
        run: str | os.PathLike[str] | None,
        *,
        script: str = "",
        arguments: tuple[str, ...] = (),
        samples: Samples | None = None,
        summary: bool = False,
        spent_s: float = 0.0,
    ) -> None:
        began = time.perf_counter()
        self.settings = settings
        self.path, self._is_numbered = chosen_path(run, script)
        self._resumes, self.removed = settings.resume, ""
        self._samples = samples
        self._summary = summary and not settings.quiet
        self._is_script = bool(script)
        self._script = script or (sys.argv[0] if sys.argv else "")
        self._arguments = arguments if script else tuple(sys.argv[1:])
        self._models, self._optimizers, self._depth = list(models), list(optimizers), 0
        self._started, self._abandoned, self._refusal = False, False, ""
        self._notifier = Notifier(self.path)
        self._error: BaseException | None = None
        self._writer: RunWriter | None = None
        self._published: dict[str, tuple[int, float]] = {}
        self.stopped_by: Finding | None = None
        # Everything that can be refused is refused here, before anything is attached or written.
        Sampling(settings.every)
        check_monitors(settings.monitors)
        monitors = requested_monitors(settings)
        check_use_of_samples(monitors, settings, has_samples=samples is not None, is_script=self._is_script)
        if self._models:
            table = build_table(self._models, self._optimizers, HUB.seen)
            for monitor in monitors:
                monitor.check_models(self._models, table)
        reminder = f"this watch was never started, so nothing was recorded: {HOW_TO_START}"
        self._reminder = weakref.finalize(self, self._notifier.remind, reminder)
        self._start_s = spent_s + time.perf_counter() - began

    def __repr__(self) -> str:
        if not self._started:
            state = "not started"
        elif self._refusal or self.removed:
            state = "not recorded"
        elif self._error is not None:
            state = f"failed with {type(self._error).__name__}, {count(self.step, 'step')}"
        else:
            state = f"{'running' if self._depth else 'finished'}, {count(self.step, 'step')}"
        return f"<{type(self).__name__}: {state}, {self.path}>"

    # Life

    def start(self) -> Self:
        """Open the run and attach; :meth:`stop`, or the end of the process, closes it.

        A watch that runs already is left as it is.
        """
        if not self._depth:
            self.__enter__()
            atexit.register(self._stop_at_exit)
        return self

    def stop(self) -> None:
        """Detach everything, evaluate the rules and close the run; nothing where that is done already.

        Raises
        ------
        RuntimeError
            If the watch was never started.
        """
        self._require_start("stop")
        atexit.unregister(self._stop_at_exit)
        self.__exit__(None, None, None)

    def _stop_at_exit(self) -> None:
        error = uncaught_exception()
        self._depth = min(self._depth, 1)
        self.__exit__(None if error is None else type(error), error, None)

    def __enter__(self) -> Self:
        """Open the run and attach; entering a watch that is entered already does nothing more."""
        self._reminder.detach()
        self._depth += 1
        if self._depth > 1:
            return self
        began = time.perf_counter()
        try:  # what is refused here is an error, before anything is attached
            monitors = MonitorSet(requested_monitors(self.settings), self._notifier)
            for monitor in monitors:
                monitor.check_process(is_script=self._is_script)
            self._writer = writer = open_writer(
                self.path, self.settings, self._notifier, script=self._script, arguments=self._arguments,
                resume=self._resumes, numbered=self._is_numbered,
            )  # fmt: skip
        except BaseException:
            self._depth = 0
            raise
        self.path, self._started = writer.path, True
        self._resumes, self._is_numbered = True, False  # entered again, it goes on with its run
        self._stack = contextlib.ExitStack()
        try:
            self._attach(writer, monitors, self._stack)
            seconds = self._start_s + time.perf_counter() - began
            self._notifier.event(COST, {"part": "start", "seconds": seconds})
        except Exception as error:  # noqa: BLE001 - a fault of backlight must not cost a training run
            self._error, self._abandoned = error, True
            self._notifier.trouble(error, "this training, which is not watched")
            self._stack.close()
            self._writer = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Detach everything, evaluate the rules and close the run; an exception passes through."""
        if not self._depth:
            return  # stopped within the block
        self._depth -= 1
        # A forked child inherits the watch, but neither its threads nor its files.
        if self._depth or self._writer is None or os.getpid() != self._pid:
            return
        self._error = failure(error)
        self._ended = time.perf_counter()
        with self._notifier.shield():
            self._stack.close()
            if self._summary and self._found is not None:
                print_result(self.path, self._found, self.step)

    def _attach(self, writer: RunWriter, monitors: MonitorSet, stack: contextlib.ExitStack) -> None:
        """Compose the parts of a watch; they are taken apart in reverse order."""
        settings, notifier = self.settings, self._notifier
        self._pid, self._error, self.stopped_by = os.getpid(), None, None
        self._found: list[Finding] | None = None
        self._alarmed = -1
        self._published.clear()
        self._monitors, self._sampling = monitors, Sampling(settings.every)
        self._scope = Scope(self._models, self._optimizers)
        # The hooks of monitors run inside the tracker, whose time includes theirs.
        timed: list[Timed] = []
        self._recorder = StepRecorder(self._scope, self._sampling, monitors, notifier, timed)
        self._tracker = StepTracker(
            self._scope, self._recorder, per_backward=settings.per_backward, max_steps=settings.steps
        )
        self._forwards = ScopeForwards(self._scope)
        results = ResultQueue()
        self._thread = WriterThread(
            self._recorder, results, monitors, writer, settings.flush_interval, notifier.trouble
        )
        timed += [self._tracker, self._forwards, self._thread]

        def on_exit(*calls: Any) -> None:
            def leave() -> None:
                for call in calls:
                    with notifier.shield():
                        call()

            stack.callback(leave)

        # Last: the file is closed when nothing writes to it any more.
        on_exit(lambda: self._finish(writer))
        # Before the end is evaluated, every step that was handed over has to be in the store.
        self._thread.start()
        on_exit(self._thread.stop)
        # First in the hub: at an event that ends a step, the tracker closes it before any monitor counts the
        # event to the next one.
        HUB.add(self._tracker, notifier.trouble)
        on_exit(lambda: HUB.remove(self._tracker))
        if not self._optimizers and not self._is_script:  # a script that has not begun has none
            HUB.optimizers.scan()
        on_exit(self._forwards.stop)
        # While the writer thread runs: what a monitor has left is stored by it.
        on_exit(self._recorder.finish, lambda: monitors.detach(self._error))
        monitors.attach(self._context(writer, results))
        # Monitors see the start of step 0 and the end of the last step: the tracker starts after them and
        # stops first.
        on_exit(self._tracker.finish)
        self._tracker.start()

    def _context(self, writer: RunWriter, results: ResultQueue) -> RunContext:
        def unbound(*_: object) -> None:
            raise RuntimeError("bound to each monitor when it is attached")

        return RunContext(
            settings=self.settings,
            arguments=self._arguments,
            samples=self._samples,
            scope=self._scope,
            hub=HUB,
            clock=self._tracker,
            recorder=results,
            writer=writer,
            notifier=self._notifier,
            path=writer.path,
            rank=writer.rank,
            world_size=rank_and_size()[1],
            listen=unbound,
            disable=unbound,
            account=unbound,
            follow_forwards=lambda: self._forwards.start(
                lambda error: self._notifier.trouble(error, "when a forward begins and ends")
            ),
            alarm=self._alarm,
            abandon=self._abandon,
            publish=self._publish,
            before_steps=self._tracker.call_before_steps,
            stopped=self._stopped,
            deliver=self._deliver,
        )

    def _finish(self, writer: RunWriter) -> None:
        """Evaluate the rules on what is stored, and close the run."""
        if self._abandoned:
            if self._refusal:
                self._monitors.call("on_run_end", [], failed=True)
                writer.discard()
            writer.close(RunStatus.FAILED)
            return
        failed = self._error is not None or self.stopped_by is not None
        with self._notifier.shield():
            self._monitors.call("on_all_stored", failed=failed)
            if nothing := why_no_step(self._tracker):
                self._notifier.unmeasured("gradient", nothing)
                self.removed = nothing if self._is_script and holds_nothing(writer) else ""
            if self._error is not None:
                payload = {"type": type(self._error).__name__, "message": str(self._error)[:2000]}
                writer.event(self._tracker.index, EXCEPTION, payload)
            writer.flush()
            if writer.lost is None and not self.removed:
                self._found = final_findings(writer, failed=failed)
        self._monitors.call("on_run_end", self._found or [], failed=failed)
        if self.removed:
            writer.discard()  # then closing it does nothing
        self._notifier.event(COST, {"part": "end", "seconds": time.perf_counter() - self._ended})
        writer.close(RunStatus.FAILED if failed else RunStatus.FINISHED)

    # Public

    def log(
        self, values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **scalars: Any
    ) -> None:
        """Record scalars of your own at the current step.

        Parameters
        ----------
        values, **scalars:
            Numbers or tensors with one element, by name: ``log({"val/accuracy": 0.9})`` or
            ``log(accuracy=0.9)``. A tensor is read later, off the step's path.
        step:
            Your own number for the step, where it is not the count of optimizer steps.

        Raises
        ------
        RuntimeError
            If the watch is not running.
        TypeError
            If a value is neither a number nor a tensor with one element.
        """
        self._require_start("log")
        if self._abandoned:
            return
        if self._writer is None or not self._depth:
            raise RuntimeError("watch.log: this watch has ended; log before it is left or stopped")
        numbers = loggable(values, scalars)
        if step is not None:
            numbers["step"] = float(step)
        self._recorder.logged.append((max(self._tracker.done - 1, 0), numbers))

    def _require_start(self, what: str) -> None:
        if not self._started:
            raise RuntimeError(f"watch.{what}: this watch was not started; {HOW_TO_START}")

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """The monitors of a watch that is or was running."""
        self._require_start("monitors")
        return tuple(self._monitors)

    @property
    def notifier(self) -> Notifier:
        """The notifier of this watch, for integrations."""
        return self._notifier

    @property
    def is_recorded(self) -> bool:
        """Whether the run directory holds this training run."""
        return self._writer is not None and not self._refusal and not self.removed

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        self._require_start("step")
        return self._tracker.done if self._writer is not None else 0

    @property
    def total_norm(self) -> tuple[int, float] | None:
        """Step and total norm over all ranks that ``reduce=True`` joined last; None on other ranks than 0."""
        self._require_start("total_norm")
        return self._published.get("total_norm")

    @property
    def findings(self) -> Findings:
        """Findings of the run so far; while it runs, of what has been flushed."""
        self._require_start("findings")
        if self._refusal or self.removed:
            return NoFindings(f"not recorded: {self.removed or self._refusal}")
        if self._writer is not None and self._depth:
            self._thread.settle()
        return findings_of(open_run(self.path))

    def check_limit(self) -> None:
        """Raise :class:`StopTraining` once the requested steps are done."""
        self._require_start("check_limit")
        self._tracker.check_limit()

    # While it runs

    def _publish(self, name: str, step: int, value: float) -> None:
        self._published[name] = (step, value)

    def _stopped(self, finding: Finding) -> None:
        self.stopped_by = finding

    def _deliver(self, findings: Sequence[Finding]) -> None:
        self._monitors.call("on_new_findings", findings)

    def _abandon(self, reason: str) -> None:
        """Stop watching; the attempt is removed once everything is detached."""
        self._refusal, self._abandoned = reason, True
        self._notifier.warn("refused", f"{reason}. This training is not watched")
        # Not inside this event, which other listeners still wait for.
        ending = NextEvent(self._stack.close)
        self._stack.callback(HUB.remove, ending)
        HUB.add(ending, self._notifier.trouble)

    def _alarm(self, step: int, cause: str) -> None:
        if step > self._alarmed:
            self._alarmed = step + self.settings.detail
            self._sampling.detail(self._tracker.index, self.settings.detail)
            self._notifier.event("detail", {"steps": self.settings.detail, "cause": cause}, step)
        self._monitors.call("on_alarm", step, cause)


@suggest_keywords
def watch(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    run: str | os.PathLike[str] | None = None,
    samples: Samples | None = None,
    summary: bool = True,
    monitors: str | Sequence[str] = DEFAULT_MONITORS,
    every: int | None = None,
    steps: int | None = None,
    groups: Mapping[str, str] | None = None,
    histogram: bool = False,
    exact_updates: int | None = None,
    per_backward: bool = False,
    reduce: bool = False,
    detail: int = 20,
    stall: float | None = None,
    trace: str | Sequence[str] | None = None,
    max_disk: int | None = None,
    flush_interval: float = 1.0,
    resume: bool = False,
    step_offset: int | None = None,
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
    trackers: str | Sequence[str] = (),
    on_finding: OnFinding | None = None,
    stop_on: str | Sequence[str] = (),
    on_stop: OnFinding | None = None,
    quiet: bool = False,
    measures: Mapping[str, Any] | Measures | None = None,
    spectra: Mapping[str, Any] | SpectraOptions | None = None,
) -> Watch:
    """Watch a training run.

    Use the result as a context manager around your loop, or call its ``start`` before the loop and its
    ``stop`` after it::

        with backlight.watch(model, optimizer, run="runs/first") as watch:
            ...
        print(watch.findings)

    Parameters
    ----------
    model:
        The model, or several; None for every model that an optimizer of the process holds.
    optimizer:
        The optimizer, or several; None for every one that holds a parameter of ``model``. One that a
        framework has wrapped means the optimizer inside.
    run:
        The run directory; None for ``runs/<script>-<time>``. One that holds a run is refused, unless
        ``resume=True`` continues that run.
    samples:
        For the monitor grokking: ``(loss_fn, batch)``, where ``loss_fn(model, batch)`` is the loss summed
        over the samples along the first dimension, and ``batch`` a fixed probe batch or a callable that gives
        one. Without them, what needs per-sample gradients is not measured. The monitor spectra splits that
        batch where ``spectra={"split": R}`` asks for it.
    summary:
        Print one line with the result to standard error at the end, on rank 0.
    monitors, every, steps, groups, ...:
        What is measured and kept: the fields of :class:`backlight.session.settings.Settings`.

    Returns
    -------
    Watch
        Not started.

    Raises
    ------
    ValueError
        If a setting is out of range.
    """
    settings = given_settings(locals())
    models = listed(model, "model", "torch.nn.Module", "parameters")
    given = listed(optimizer, "optimizer", "torch.optim.Optimizer", "param_groups")
    optimizers = [inner for outer in given for inner in underlying(outer)]
    if samples is not None:
        check_samples(samples, models)
    return Watch(models, optimizers, Settings.of(settings), run, samples=samples, summary=summary)
