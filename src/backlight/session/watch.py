"""``watch``: attach the monitors to a training run, and record it in a run directory."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from backlight import clock
from backlight.capture.engines import underlying
from backlight.capture.hub import HUB
from backlight.capture.parameters import Scope, build_table
from backlight.capture.training_stop import StopTraining
from backlight.distributed import rank_and_size
from backlight.findings.evaluate import Findings, NoFindings, findings_of
from backlight.interrupts import is_interrupt
from backlight.monitor import Monitor, Samples, check_monitors
from backlight.notebook import STARTED, notebook_name, notebook_shell
from backlight.notifier import Notifier
from backlight.records import Finding, RunStatus
from backlight.session.attached_run import AttachedRun
from backlight.session.monitor_set import MonitorSet, check_use_of_samples, requested_monitors
from backlight.session.run_directory import chosen_path, is_chosen_by_launcher, open_writer
from backlight.session.sampling import Sampling
from backlight.session.script_end import failure, print_result, uncaught_exception
from backlight.session.settings import (
    DEFAULT_MONITORS,
    Settings,
    check_samples,
    given_settings,
    listed,
    loggable,
    suggest_keywords,
)
from backlight.settings import MonitorSettings
from backlight.store.errors import RunPathError, RunWriteError, StoreError
from backlight.store.format.schema import STATIC_READING
from backlight.store.read.run import open_run
from backlight.text import count
from backlight.user_code import process_script

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backlight.session.settings import OnFinding
    from backlight.store.format.manifest import Progress

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
    reading:
        What the static reading of the script remarks on its lines; stored as events.
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
        began = clock.perf_counter()
        self.settings = settings
        self.path, self._is_numbered = chosen_path(run, script)
        self._is_chosen = run is not None
        self._resumes = settings.resume
        self._samples = samples
        self._summary = summary and not settings.quiet
        self._is_script = bool(script)
        if notebook_shell() is not None:  # its arguments are those of the kernel
            script = script or f"{notebook_name()}.ipynb"
        self._script = script or process_script()
        if not script and self._script in sys.argv[:1]:  # else they are of the library that started it
            arguments = tuple(sys.argv[1:])
        self._arguments = arguments
        self._scope, self._depth = Scope(models, optimizers), 0
        self._started = self._abandoned = False
        self.reading: Sequence[Mapping[str, Any]] = ()
        self._notifier = Notifier(self.path)
        self._failure = self._refusal = ""
        self._attached: AttachedRun | None = None
        # Everything that can be refused is refused here, before anything is attached or written.
        Sampling(settings.every)
        check_monitors(settings.monitors)
        monitors = requested_monitors(settings)
        check_use_of_samples(monitors, settings, has_samples=samples is not None, is_script=self._is_script)
        if models:
            table = build_table(models, optimizers, HUB.seen)
            for monitor in monitors:
                monitor.check_models(models, table)
        reminder = f"this watch was never started, so nothing was recorded: {HOW_TO_START}"
        self._reminder = weakref.finalize(self, self._notifier.remind, reminder)
        self._start_s = spent_s + clock.perf_counter() - began

    def __repr__(self) -> str:
        if not self._started:
            state = "not started"
        elif self._attached is not None and self._attached.not_kept:
            state = "not recorded"
        elif self._failure:
            state = f"failed with {self._failure}, {count(self.step, 'step')}"
        else:
            state = f"{'running' if self._depth else 'finished'}, {count(self.step, 'step')}"
        return f"<{type(self).__name__}: {state}, {self.path}>"

    # Life

    def start(self) -> Self:
        """Open the run and attach; :meth:`stop`, or the end of the process, closes it.

        A watch that runs already is left as it is.
        """
        if not self._depth:
            STARTED.add(self)
            self.__enter__()
            atexit.register(self._stop_at_exit)
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Detach everything, evaluate the rules and close the run; nothing where that is done already.

        ``error`` is the exception that ended the training run, if one did.

        Raises
        ------
        RuntimeError
            If the watch was never started.
        """
        self._require_start("stop")
        atexit.unregister(self._stop_at_exit)
        self.__exit__(None if error is None else type(error), error, None)

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
        began = clock.perf_counter()
        try:  # what is refused here is an error, before anything is attached
            monitors = MonitorSet(requested_monitors(self.settings), self._notifier)
            for monitor in monitors:
                monitor.check_process(is_script=self._is_script)
            writer = open_writer(
                self.path, self.settings, self._notifier, script=self._script, arguments=self._arguments,
                resume=self._resumes, numbered=self._is_numbered,
            )  # fmt: skip
        except BaseException as error:
            if is_interrupt(error) or not self._is_of_the_disk(error):
                self._depth = 0
                raise
            self._started, self._abandoned = True, True
            self._failure, self._refusal = type(error).__name__, str(error)
            self._notifier.warn("unwatched", f"this training is not watched: {error}")
            return self
        self.path, self._started = writer.path, True
        self._resumes, self._is_numbered = True, False  # entered again, it goes on with its run
        self._attached, self._failure, self._abandoned = None, "", False
        try:
            self._attached = AttachedRun(
                self.settings, writer, monitors, self._notifier, self._scope.renewed(),
                is_script=self._is_script,
            )  # fmt: skip
            self._attached.attach(self._samples, self._arguments)
            for payload in self.reading:
                self._notifier.event(STATIC_READING, payload)
            self._attached.record_cost("start", self._start_s + clock.perf_counter() - began)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._failure, self._refusal, self._abandoned = type(error).__name__, str(error), True
            self._notifier.trouble(error, "this training, which is not watched")
            if self._attached is None:
                writer.close(RunStatus.FAILED)
            else:
                self._attached.abandon()
        return self

    def _is_of_the_disk(self, error: BaseException) -> bool:
        """Return whether the disk refuses the run, and not an option of the user's: training goes on."""
        if isinstance(error, RunPathError) and self._is_chosen:
            return False
        # A directory of the launcher is none that the user could change.
        return isinstance(error, StoreError if is_chosen_by_launcher(self.path) else RunWriteError)

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
        attached = self._attached
        if self._depth or self._abandoned or attached is None:
            return
        failed = failure(error)
        self._failure = "" if failed is None else type(failed).__name__
        with self._notifier.shield():
            closed = attached.close(failed)
            if closed and self._summary and attached.findings is not None and notebook_shell() is None:
                print_result(self.path, attached.findings, self.step, attached.writer.progress)

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
        if self._attached is None or self._attached.is_abandoned:
            return
        if not self._depth:
            raise RuntimeError("watch.log: this watch has ended; log before it is left or stopped")
        numbers = loggable(values, scalars)
        if step is not None:
            numbers["step"] = float(step)
        self._attached.log(numbers)

    def _require_start(self, what: str) -> None:
        if not self._started:
            raise RuntimeError(f"watch.{what}: this watch was not started; {HOW_TO_START}")

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """The monitors of a watch that is or was running."""
        self._require_start("monitors")
        return tuple(self._attached.monitors) if self._attached is not None else ()

    @property
    def notifier(self) -> Notifier:
        """The notifier of this watch, for integrations."""
        return self._notifier

    @property
    def is_recorded(self) -> bool:
        """Whether the run directory holds this training run."""
        attached = self._attached
        return attached is not None and not self._abandoned and not attached.not_kept

    @property
    def progress(self) -> Progress | None:
        """How far this rank was recorded, and how it ended; None of a watch without a run."""
        return None if self._attached is None else self._attached.writer.progress

    @property
    def stopped_by(self) -> Finding | None:
        """The finding that ended the run by ``stop_on``; None for any other end."""
        return None if self._attached is None else self._attached.stopped_by

    @property
    def removed(self) -> str:
        """Why the run was removed: a script that ended before its training, and left nothing to read."""
        return "" if self._attached is None else self._attached.removed

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        self._require_start("step")
        return 0 if self._attached is None or self._abandoned else self._attached.recorder.done

    @property
    def findings(self) -> Findings:
        """Findings of the run so far; while it runs, of what has been flushed."""
        self._require_start("findings")
        if self._attached is None:
            return NoFindings(f"not recorded: {self._refusal}")
        if self._attached.not_kept:
            return NoFindings(f"not recorded: {self._attached.not_kept}")
        if self._depth and not self._abandoned:
            self._attached.thread.settle()
        return findings_of(open_run(self.path))

    @property
    def final_findings(self) -> list[Finding] | None:
        """What the evaluation at the end found; None before, without one, and where other ranks matter."""
        return None if self._attached is None or rank_and_size()[1] > 1 else self._attached.findings

    def mark_step(self) -> None:
        """End a step: call it after each update that no ``torch.optim`` optimizer makes.

        Gradients that are still in ``.grad`` are recorded. The update itself is not measured.

        Raises
        ------
        RuntimeError
            If the watch was never started.
        """
        self._require_start("mark_step")
        if self._depth and self._attached is not None and not self._attached.is_abandoned:
            with self._notifier.shield():
                self._attached.recorder.mark_step()

    def check_limit(self) -> None:
        """Raise :class:`StopTraining` once the requested steps are done."""
        self._require_start("check_limit")
        if self._attached is not None:
            self._attached.recorder.check_limit()


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
    detail: int = 20,
    trackers: str | Sequence[str] = (),
    max_disk: int | None = None,
    flush_interval: float = 1.0,
    resume: bool = False,
    step_offset: int | None = None,
    share: bool = False,
    redact: str | Sequence[str] = (),
    keep_arguments: bool = False,
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
    on_finding: OnFinding | None = None,
    stop_on: str | Sequence[str] = (),
    on_stop: OnFinding | None = None,
    quiet: bool = False,
    **of_monitors: Mapping[str, Any] | MonitorSettings | None,
) -> Watch:
    """Watch a training run.

    Use the result as a context manager around your loop, or call its ``start`` before the loop and its
    ``stop`` after it::

        with backlight.watch(model, optimizer) as watch:
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
        one. A third entry is a held-out batch: which samples of the probe batch carry the drop of its loss
        is measured too. Without samples, what needs per-sample gradients is not measured. The monitor spectra
        splits that batch where ``spectra={"split": R}`` asks for it.
    summary:
        Print one line with the result to standard error at the end, on rank 0.
    monitors, every, steps, groups, ...:
        What is measured and kept: the fields of :class:`backlight.session.settings.Settings`.
    **of_monitors:
        Settings of a monitor by its name (health, stalls, grokking, spectra), as a mapping or an object of
        its class: ``health={"exact_updates": 8}``.

    Returns
    -------
    Watch
        Not started.

    Raises
    ------
    ValueError
        If a setting is out of range.
    """
    settings = given_settings({**locals(), **of_monitors})
    models = listed(model, "model", "torch.nn.Module", "parameters")
    outer_optimizers = listed(optimizer, "optimizer", "torch.optim.Optimizer", "param_groups")
    optimizers = [inner for outer in outer_optimizers for inner in underlying(outer)]
    if samples is not None:
        check_samples(samples, models)
    return Watch(models, optimizers, Settings.of(settings), run, samples=samples, summary=summary)
