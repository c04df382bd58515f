"""``watch``: attach the monitors to a training, record it in a run directory, take everything off again."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from backlight.capture.fingerprint import take_fingerprint
from backlight.capture.forward_scope import Following
from backlight.capture.hooks.optimizers import underlying
from backlight.capture.hub import HUB
from backlight.capture.parameters import build_table
from backlight.capture.process_group import launch_id, place
from backlight.capture.scope import Scope
from backlight.capture.step_limit import LimitedTracker, StopTraining
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.health.model.groups import GroupError, members
from backlight.monitors.stalls.instrument.trace_option import start_tracing
from backlight.monitors.stalls.instrument.watchdog_client import Stalling
from backlight.monitors.steptime.instrument.runtime_info import (
    CIRCUMSTANCES,
    CoreWait,
    Pauses,
    circumstances,
    ways_of,
)
from backlight.notifier import Notifier
from backlight.records import Finding, Made, RunStatus
from backlight.session.distributed_norm import Reducing
from backlight.session.finalize import final_findings
from backlight.session.probes import make_plan
from backlight.session.run_directory import open_writer
from backlight.session.sampling import Cadence
from backlight.session.settings import Settings
from backlight.session.step_recorder import Recorder
from backlight.session.trackers.thread import Tracking
from backlight.session.writer_thread import Drain
from backlight.store.default_path import default_path
from backlight.store.read.run import open_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backlight.monitors.grokking.instrument.geometry import Samples
    from backlight.monitors.spectra.instrument.replicates import Replicating
    from backlight.monitors.stalls.instrument.backward_trace import Tracer
    from backlight.store.write.writer import RunWriter


class Watch:
    """One watched training; made by :func:`watch`, used as a context manager.

    Attributes
    ----------
    path:
        The run directory, once entered.
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
    ) -> None:
        self.settings = settings
        self._samples = samples
        self.path = Path(run) if run is not None else default_path(script, _shared_launch())
        self._script = script or (sys.argv[0] if sys.argv else "")
        self._arguments = arguments if script else tuple(sys.argv[1:])
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._depth = 0
        self._abandoned = False
        self._notifier = Notifier(self.path)
        self._reducing = Reducing(settings, self._notifier, launched=bool(script))
        self._fingerprinted = False
        self._writer: RunWriter | None = None
        self._following: Following | None = None
        self._stalling: Stalling | None = None
        self._tracing: Tracer | None = None
        self._pauses: Pauses | None = None
        self._ways: list[dict[str, Any]] = []
        self._waiting: CoreWait | None = None
        # Everything that can be refused is refused here, before anything is attached or written.
        exact = settings.exact_updates
        probes = {"update": {"per_tensor": None, "spacing": exact}} if exact is not None else {}
        self._plan = make_plan(
            settings.monitors, {"histogram"} if settings.histogram else (), probes, self._notifier.left_out
        )
        self._cadence = Cadence(settings.every)
        if self._models:
            table = build_table(self._models, self._optimizers, HUB.seen)
            for pattern in settings.groups.values():
                members([record.name for record in table.records], pattern)
            if "spectra" in settings.monitors:
                from backlight.monitors.spectra.instrument.layer_selection import selected  # noqa: PLC0415 - others need not pay for it

                selected(settings.spectra, table)

    # Life

    def __enter__(self) -> Self:
        """Open the run and attach; entering a watch that is entered already does nothing more."""
        self._depth += 1
        if self._depth == 1:
            try:
                self._open()  # what this refuses is an error, before anything is attached
            except BaseException:
                self._depth = 0
                raise
            try:
                self._attach()
            except Exception as error:  # noqa: BLE001 - a fault of ours must not cost anybody a training
                self._abandon(error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take everything off, judge the run and close it; an exception goes on its way."""
        self._depth -= 1
        if self._depth:
            return
        failed = error if error is not None and not _clean(error) else None
        self._end(failed)

    def _open(self) -> None:
        self._reducing.check()
        self._writer = open_writer(
            self.path, self.settings, self._notifier, script=self._script, arguments=self._arguments
        )
        self.path = self._writer.path

    def _attach(self) -> None:
        assert self._writer is not None
        settings = self.settings
        self._scope = Scope(self._models, self._optimizers)
        self._recorder = Recorder(self._scope, self._plan, self._cadence, self._notifier.event, self._at_step)
        if "grokking" in settings.monitors:
            from backlight.monitors.grokking.instrument.geometry import Geometry  # noqa: PLC0415 - others need not pay for it

            self._recorder.geometry = Geometry(
                settings.measures, self._samples, self._models, self.path, self._notifier
            )
        self._replicating: Replicating | None = None
        if "spectra" in settings.monitors:
            from backlight.monitors.spectra.instrument.replicates import Replicating  # noqa: PLC0415 - others need not pay for it

            self._replicating = Replicating(
                settings.spectra, settings.every, self._samples, self._scope, self._notifier
            )
            self._recorder.replicating = self._replicating
        self._drain = Drain(
            self._recorder, self._writer, settings.flush_interval, self._alarm, self._notifier.trouble
        )
        self._drain.reducing = self._reducing
        self._drain.tracking = self._tracking = Tracking(settings, self._writer, self._notifier)
        self._tracker = LimitedTracker(self._scope, self._recorder, per_backward=settings.per_backward)
        self._tracker.check_limit, self._tracker.trouble = self.check_limit, self._trouble
        self._recorder.spent = lambda: (
            self._tracker.spent
            + self._drain.spent
            + (self._following.spent if self._following is not None else 0.0)
            + (self._stalling.spent if self._stalling is not None else 0.0)
        )
        self._pid = os.getpid()
        self._alarmed = -1
        self._fingerprinted = False
        HUB.add(self._tracker)
        if self._replicating is not None:
            # After the tracker, which closes the step before.
            self._replicating.start()
            HUB.add(self._replicating.listener)
        if not self._optimizers:
            HUB.optimizers.scan()
        self._drain.start()
        if {"stalls", "steptime"} & set(settings.monitors):
            self._following = Following(self._scope, self._forwards_lost)
            with self._notifier.shield():
                self._following.start()
        if "stalls" in settings.monitors:
            self._stalling = Stalling(
                self._writer,
                self._scope,
                stall=settings.stall,
                thresholds=settings.thresholds.get("stalls", {}),
                notice=self._notifier.event,
                parameters_changed=self._recorder.parameters_changed,
                names_known=self._early_fingerprint,
            )
            with self._notifier.shield():
                self._stalling.start()
        self._ways, self._waiting = [], None
        if "steptime" in settings.monitors:
            self._pauses = Pauses(self._notifier.event, lambda: self._tracker.index)
            self._pauses.start()
        if settings.trace:
            with self._notifier.shield():
                self._tracing = start_tracing(settings.trace, self._writer, lambda: self._tracker.index)

    def _abandon(self, error: Exception) -> None:
        """Take off what was attached before ``error``, and let the training go on unwatched."""
        self._notifier.trouble(error, "this training, which is not watched")
        for name in ("_tracker", "_replicating"):
            part = getattr(self, name, None)
            if part is not None:
                HUB.remove(getattr(part, "listener", part))
        for name in ("_following", "_pauses", "_drain"):
            with contextlib.suppress(Exception):
                if (part := getattr(self, name, None)) is not None:
                    part.stop()
        with contextlib.suppress(Exception):
            if self._stalling is not None:
                self._stalling.stop(error)
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close(RunStatus.FAILED)
        self._writer, self._abandoned = None, True

    def _end(self, error: BaseException | None) -> None:
        writer = self._writer
        if writer is None or os.getpid() != self._pid:
            return
        findings: list[Finding] = []
        if self._stalling is not None:
            with self._notifier.shield():
                self._stalling.stop(error)
        if self._tracing is not None:
            with self._notifier.shield():
                self._tracing.stop()
        with self._notifier.shield():
            self._tracker.finish()
        HUB.remove(self._tracker)
        if self._following is not None:
            self._following.stop()
        if self._replicating is not None:
            HUB.remove(self._replicating.listener)
            with self._notifier.shield():
                self._replicating.stop(failed=error is not None)
        if self._pauses is not None:
            with self._notifier.shield():
                self._pauses.stop()
                facts = circumstances(self._ways, self._waiting)
                self._notifier.event(CIRCUMSTANCES, facts, max(self._tracker.done - 1, 0))
        with self._notifier.shield():
            self._drain.stop()
            self._reducing.stop(failed=error is not None)
            self._take_fingerprint()
            self._say_if_nothing()
            if error is not None:
                writer.event(
                    self._tracker.index,
                    "exception",
                    {"type": type(error).__name__, "message": str(error)[:2000]},
                )
            writer.flush()
            findings = final_findings(writer, failed=error is not None)
        self._tracking.end(findings, self._tracker.done - 1, failed=error is not None)
        with self._notifier.shield():
            writer.close(RunStatus.FINISHED if error is None else RunStatus.FAILED)

    def _forwards_lost(self, error: Exception) -> None:
        self._notifier.trouble(error, "when a forward begins and ends")

    def _say_if_nothing(self) -> None:
        if self._tracker.done:
            return
        seen = self._tracker.backwards
        reason = (
            f"{seen} backward passes were seen, but no step of a torch.optim optimizer that holds the "
            "model: in a loop that updates by hand, call backlight.collect"
            if seen
            else "neither a backward pass nor an optimizer step was seen"
        )
        self._notifier.unmeasured("gradients", reason)

    # What the user calls

    def log(self, step: int | None = None, **scalars: Any) -> None:
        """Record scalars of your own at the current step.

        Parameters
        ----------
        step:
            Your own number for the step, where it is not the count of optimizer steps.
        **scalars:
            Numbers or tensors with one element; a tensor is read later, off the step's path.

        Raises
        ------
        RuntimeError
            If the watch is not entered.
        TypeError
            If a value is neither a number nor a tensor with one element.
        """
        if self._abandoned:
            return
        if self._writer is None or not self._depth:
            raise RuntimeError(
                "watch.log: this watch is not entered; call it inside `with backlight.watch(...)`"
            )
        values = {name: _loggable(name, value) for name, value in scalars.items()}
        done = self._tracker.done
        at = max(done - 1, 0)
        if step is not None:
            values["step"] = float(step)
        self._recorder.user.append((at, values))

    @property
    def notifier(self) -> Notifier:
        """What says what this watch has to say, for an integration that has more of it."""
        return self._notifier

    @property
    def step(self) -> int:
        """Number of optimizer steps seen so far."""
        return self._tracker.done if self._writer is not None else 0

    @property
    def total_norm(self) -> tuple[int, float] | None:
        """Step and total norm over all ranks that ``reduce=True`` joined last; None on other ranks than 0."""
        return self._reducing.latest

    @property
    def findings(self) -> list[Finding]:
        """What the rules say of the run as it stands; while it runs, of what has been flushed."""
        if self._writer is None:
            return []
        if self._depth:
            self._drain.settle()
        run = open_run(self.path)
        return evaluate_rules(run, made=Made.LIVE)

    # What happens on the way

    def _trouble(self, error: Exception) -> None:
        if self._replicating is not None:
            self._replicating.off()
        self._notifier.trouble(error)

    def check_limit(self) -> None:
        """Check whether the training may go on.

        Raises
        ------
        StopTraining
            Once the steps that were asked for are done.
        """
        limit = self.settings.steps
        if limit is not None and self._tracker.done >= limit:
            raise StopTraining(0)

    def _at_step(self, index: int) -> None:
        if self._pauses is not None:
            self._pauses.tell()
        self._tracking.meet()
        if index:
            self._take_fingerprint()
            self._reducing.begin()  # every rank comes here when its first step is over

    def _take_fingerprint(self) -> None:
        if self._writer is not None and self._scope.table.records and not self._fingerprinted:
            self._fingerprinted = True
            try:
                self._writer.fingerprint(take_fingerprint(self._scope, self._arguments))
                self._waiting = CoreWait()
                self._ways = [way for optimizer in self._scope.optimizers() for way in ways_of(optimizer)]
                self._unmeasured()
            except Exception as error:  # noqa: BLE001 - the rest of the run is worth having without it
                self._notifier.trouble(error, "the fingerprint")

    def _early_fingerprint(self) -> None:
        """Say what this run is before its first backward, which may never return."""
        if self._writer is not None and not self._fingerprinted:
            with self._notifier.shield():
                self._writer.fingerprint(take_fingerprint(self._scope, self._arguments))

    def _unmeasured(self) -> None:
        names = [record.name for record in self._scope.table.records]
        for group, pattern in self.settings.groups.items():
            try:
                members(names, pattern)
            except GroupError as error:
                self._notifier.unmeasured(f"group {group}", str(error))
                self._notifier.warn(f"group {group}", f"the group {group!r} is not measured: {error}")
        devices = {record.device.split(":")[0] for record in self._scope.table.records} - {"cpu"}
        if devices and "steptime" in self.settings.monitors:
            reason = "phases are host times; what the device does meanwhile is not separated"
            self._notifier.unmeasured(f"device time on {', '.join(sorted(devices))}", reason)

    def _alarm(self, step: int, cause: str) -> None:
        if step > self._alarmed:
            self._alarmed = step + self.settings.detail
            self._cadence.detail(self._tracker.index, self.settings.detail)
            self._notifier.event("detail", {"steps": self.settings.detail, "cause": cause}, step)


def _shared_launch() -> str | None:
    return launch_id() if place()[1] > 1 else None


def _clean(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in {None, 0}


def _loggable(name: str, value: Any) -> Any:
    try:
        if hasattr(value, "detach") and value.numel() == 1:
            return value.detach().reshape(()).clone()
        return float(value)
    except (TypeError, ValueError, AttributeError):
        kind = type(value).__name__
        raise TypeError(
            f"watch.log({name}=...): expected a number or a tensor with one element, got {kind}"
        ) from None


def watch(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    run: str | os.PathLike[str] | None = None,
    samples: Samples | None = None,
    **settings: Any,
) -> Watch:
    """Watch a training; use the result as a context manager around your loop.

    Parameters
    ----------
    model:
        The model, or several; None for every model that an optimizer of the process holds.
    optimizer:
        The optimizer, or several; None for every one that holds a parameter of ``model``. One that a
        framework has wrapped stands for the optimizer inside.
    run:
        The run directory; None for ``runs/<script>-<time>``. A folder that holds a run gets a new
        attempt of it.
    samples:
        For the monitor grokking: ``(loss_fn, batch)``, where ``loss_fn(model, batch)`` is the loss summed
        over
        the samples along the first dimension, and ``batch`` a fixed probe batch or a callable that gives
        one. Without them, what needs per-sample gradients is not measured. The monitor spectra splits that
        batch where ``spectra={"split": R}`` asks for it.
    **settings:
        Fields of :class:`backlight.session.settings.Settings`: ``monitors``, ``every``, ``groups``,
        ``histogram``, ``thresholds``, ``max_disk`` and others.

    Returns
    -------
    Watch
        Not yet attached.

    Raises
    ------
    ValueError
        If a setting is out of range or unknown.
    """
    models = _listed(model, "model", "torch.nn.Module", "parameters")
    given = _listed(optimizer, "optimizer", "torch.optim.Optimizer", "param_groups")
    optimizers = [inner for outer in given for inner in underlying(outer)]
    if samples is not None:
        from backlight.monitors.grokking.instrument.geometry import check_samples  # noqa: PLC0415 - others need not pay for it

        check_samples(samples, models)
    checked = Settings.of(settings)
    splits = "spectra" in checked.monitors and checked.spectra.split > 0
    if samples is not None and "grokking" not in checked.monitors and not splits:
        raise ValueError(
            f"watch: samples are for the monitor grokking, and for spectra={{'split': R}}, but "
            f"monitors={checked.monitors}; add 'grokking', or 'spectra' with a split"
        )
    if samples is None and splits:
        raise ValueError(
            f"watch: spectra.split={checked.spectra.split} needs samples=(loss_fn, batch) to split"
        )
    return Watch(models, optimizers, checked, run, samples=samples)


def _listed(given: Any, what: str, expected: str, attribute: str) -> list[Any]:
    if given is None:
        return []
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    for item in listed:
        if not hasattr(item, attribute):
            raise ValueError(f"watch: {what} is {type(item).__name__}, expected {expected} or a list of them")
    return listed
