"""The interface of everything that attaches to a live run, and the registry of its implementations. No torch.

A monitor is one class: it validates the settings that request it, attaches to a run, and implements the hooks
that it needs. :class:`backlight.session.monitor_set.MonitorSet` calls the hooks; see ``docs/extending.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from backlight.distributed import rank_and_size
from backlight.registry import Registry
from backlight.settings import SettingError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from backlight.capture.hub import Listener
    from backlight.capture.parameters import ParameterTable, Scope
    from backlight.capture.step_summary import StepSummary
    from backlight.records import Finding, ParameterRecord
    from backlight.session.attached_run import AttachedRun
    from backlight.session.settings import Settings
    from backlight.session.step_recorder import StepRecord

Samples = tuple[Callable[[Any, Any], Any], Any] | tuple[Callable[[Any, Any], Any], Any, Any]
"""``(loss_fn, batch)``: ``loss_fn(model, batch)`` is the loss summed over the samples; ``batch`` is a fixed
probe batch or a callable that returns one. A third is a held-out batch."""


NEVER = 2**62
"""The number of no step."""

FIRST_STEPS = 64
"""Steps at the start of which 0 and the powers of two are measured."""

PER_OCTAVE = 16
"""Most measurements while the number of steps doubles."""


def next_due(step: int, every: int) -> int:
    """Return the first step after ``step`` that is measured; with ``every`` 0 they become ever rarer.

    Steps 0, 1, 2, 4, 8, 16 and 32, every 64th up to step 2,048, and from there 16 while the number of steps
    doubles.
    """
    if every:
        return step - step % every + every
    if step < FIRST_STEPS:
        return 1 << step.bit_length() if step else 1
    spacing = max(FIRST_STEPS, (1 << step.bit_length() - 1) // PER_OCTAVE)
    return step - step % spacing + spacing


class StepClock(Protocol):
    """The position of a run, in optimizer steps."""

    @property
    def index(self) -> int:
        """Number of the step in progress, from 0."""

    @property
    def done(self) -> int:
        """Number of completed steps."""


class Timed(Protocol):
    """Something that takes time on behalf of backlight."""

    @property
    def spent(self) -> float:
        """Seconds taken so far."""


class Recorder(Protocol):
    """Takes results from any thread; the writer thread stores them, so that training never waits for it."""

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        """Store scalars of one step."""

    def array(
        self,
        name: str,
        step: int,
        values: Any,
        *,
        dims: tuple[str, ...] = (),
        unit: str = "1",
        encoding: str = "plain",
    ) -> None:
        """Store one array."""

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Store one event."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of some parameters as backward left them: before clipping, and before the optimizer's step.

    Attributes
    ----------
    rows:
        Row of each parameter in ``table``.
    parameters:
        The parameters, in the same order.
    tensors:
        The part of each gradient that this rank holds; None where there is none.
    scale:
        Factor of a gradient scaler that the gradients still contain; None for 1.
    table:
        The parameter table of the run.
    """

    rows: list[int]
    parameters: list[torch.Tensor]
    tensors: list[torch.Tensor | None]
    scale: torch.Tensor | float | None
    table: ParameterTable


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A recorded step with its values on the host, as the writer thread is about to store them.

    Attributes
    ----------
    step, parameters:
        Number of the step, and the rows of its parameter table.
    scalars:
        Scalars by name; what a monitor adds here is stored with the step.
    blobs:
        float64 ``[P, F]`` and int64 ``[P, I]`` by series and part; unmeasured rows are 0.
    """

    step: int
    parameters: tuple[ParameterRecord, ...]
    scalars: dict[str, float]
    blobs: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]]


class RunHandle:
    """Access of one monitor to the run that it is attached to.

    Attributes
    ----------
    settings, arguments:
        Settings of the watch, and the arguments of the script.
    samples:
        ``(loss_fn, batch)`` as given to ``watch``, None otherwise.
    scope:
        The watched models and optimizers, and their parameter table.
    clock:
        The step in progress.
    recorder:
        Takes scalars, arrays and events; the writer thread stores them.
    writer:
        The run of this rank, for what must be on disk at once.
    notifier:
        Warns the user, and records what is not measured.
    path, rank, world_size:
        The run directory, and the position of this process among all ranks.
    """

    def __init__(
        self, session: AttachedRun, monitor: Monitor, samples: Samples | None, arguments: tuple[str, ...]
    ) -> None:
        self._session, self._monitor = session, monitor
        self.settings, self.arguments, self.samples = session.settings, arguments, samples
        self.scope: Scope = session.scope
        self.clock: StepClock = session.recorder
        self.recorder: Recorder = session.results
        self.writer, self.notifier = session.writer, session.notifier
        self.path, self.rank = session.writer.path, session.writer.rank
        self.world_size = rank_and_size()[1]

    def listen(self, listener: Listener) -> None:
        """Deliver raw events to a listener of this monitor until it is detached."""
        self._session.monitors.listen(self._monitor, listener)

    def disable(self, error: Exception) -> None:
        """Detach this monitor after an error outside of its hooks."""
        self._session.monitors.disable(self._monitor, error)

    def account(self, timed: Timed) -> None:
        """Count ``timed.spent``, the seconds of a thread or of a device, as a cost of the watch."""
        self._session.monitors.account(timed)

    def follow_forwards(self) -> None:
        """Request ``forward_begin`` and ``forward_end`` events of the outermost modules."""
        self._session.follow_forwards()

    def alarm(self, step: int, cause: str) -> None:
        """Request that the next steps are recorded in detail."""
        self._session.alarm(step, cause)

    def fact(self, rule: str, kind: str = "") -> None:
        """Report that something was recorded which ``rule`` reads, and which holds whatever follows.

        The rule is evaluated at once, for each ``kind`` of what it reads.
        """
        self._session.fact(rule, kind)

    def abandon(self, reason: str) -> None:
        """End the watch, and keep nothing of it; the training goes on."""
        self._session.refuse(reason)

    def before_steps(self, action: Callable[[], None]) -> None:
        """Call ``action()`` on the training thread before the first backward of each step from here on.

        A later action replaces it.
        """
        self._session.recorder.call_before_steps(action)

    def stopped(self, finding: Finding) -> None:
        """Record that ``finding`` ends the run."""
        self._session.stopped_by = finding

    def deliver(self, findings: Sequence[Finding]) -> None:
        """Call ``on_new_findings`` of every monitor and output."""
        self._session.deliver(findings)


class Monitor:
    """Measures one aspect of a watched run.

    Hooks run on the training thread and must neither block nor synchronise a device, except those documented
    to run on another thread. An exception disables this monitor only; the run continues.

    Attributes
    ----------
    name:
        Unique name; also the prefix of its scalars where it is a third-party monitor.
    requested_by:
        Name in ``Settings.monitors`` that requests it: its own where empty. None where another setting does.
    records:
        What is no longer recorded when it is disabled, for the warning; ``name`` where empty.
    after:
        Names of monitors that are called, attached and detached before this one; else the names decide.
    wants_backwards:
        Whether :meth:`on_backward_end` is to be called for every backward pass of a recorded step.
    uses_samples, needs_samples:
        Whether it makes use of ``watch(samples=...)``; the setting that cannot do without, empty for none.
    samples_for:
        The setting that makes use of them, for the error where none does.
    """

    name: ClassVar[str]
    requested_by: ClassVar[str | None] = ""
    records: ClassVar[str] = ""
    after: ClassVar[tuple[str, ...]] = ()
    samples_for: ClassVar[str] = ""
    wants_backwards: bool = False
    uses_samples: bool = False
    needs_samples: str = ""

    @classmethod
    def from_settings(cls, settings: Settings) -> Monitor | None:
        """Return an instance if the settings request one, else None; raise ValueError for bad settings."""
        return cls() if (cls.requested_by or cls.name) in settings.monitors else None

    def check_models(self, models: Sequence[nn.Module], table: ParameterTable) -> None:
        """Raise ValueError where the models given to ``watch`` cannot be measured as requested."""

    def check_process(self, *, is_script: bool) -> None:
        """Raise where this process cannot be measured as requested; called before the run is opened.

        ``is_script`` says that the script has yet to run, inside the watch.
        """

    def attach(self, run: RunHandle) -> None:
        """Start to observe ``run``; step 0 has not begun."""

    def detach(self, error: BaseException | None) -> None:
        """Remove everything that was attached; ``error`` is what ended the run, None if it finished."""

    # On the training thread

    def on_step_start(self, step: int) -> None:
        """A step begins; it may or may not be recorded."""

    def on_parameters_known(self) -> None:
        """Every parameter is in the table: the first step is over, or the run ends before a second one."""

    def wants_step(self, step: int) -> bool:
        """Return whether this step must be recorded; called after :meth:`on_step_start`."""
        return False

    def next_step(self, step: int) -> int:
        """Return the first step after ``step`` at which ``on_step_start`` or ``wants_step`` has to be called.

        Asked where ``step`` is not recorded; for a monitor that implements neither, it is not. Recorded steps
        are always called.
        """
        return step + 1

    def on_backward_end(self, gradients: Gradients, part: int, record: StepRecord) -> None:
        """Backward number ``part``, from 1, of a recorded step is over; only with ``wants_backwards``."""

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Gradients of a recorded step are final; called once per optimizer, or per clipping before it."""

    def on_before_optimizer_step(self, parameters: Sequence[torch.Tensor], record: StepRecord) -> None:
        """An optimizer is about to update ``parameters`` in a recorded step."""

    def on_after_optimizer_step(self, record: StepRecord) -> None:
        """That optimizer has updated them."""

    def on_step_end(self, summary: StepSummary, record: StepRecord) -> None:
        """A recorded step ends; scalars added to ``record`` are stored with it."""

    def on_gradients_left(self, gradients: Gradients, record: StepRecord) -> None:
        """The run ends, or a model is freed: the last step, not recorded, has left gradients in ``.grad``."""

    # On the writer thread

    def on_step_stored(self, step: StoredStep) -> None:
        """A recorded step is on the host and about to be stored."""

    def on_step_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Loss, learning rates and clip norm of a step that is not recorded, in order with those that are."""

    def on_scalars_logged(self, step: int, values: Mapping[str, float]) -> None:
        """The user logged ``values`` at ``step``."""

    def on_alarm(self, step: int, cause: str) -> None:
        """A monitor raised an alarm about a step, such as a gradient that is not finite."""

    def on_fact(self, rule: str, kind: str = "") -> None:
        """A fact that ``rule`` reads was recorded, of one ``kind``; called on the thread that recorded it."""

    def on_flush(self) -> None:
        """Everything so far is on disk, where a reader sees it."""

    # On the evaluation thread while the run goes on; with the rest at the end

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """The rules found what no earlier call held; on rank 0 only."""

    # At the end, on the training thread; all monitors are detached and the writer thread has ended

    def on_all_stored(self, *, failed: bool) -> None:
        """The last step has been stored; ``failed`` says that an exception ended the training run."""

    def on_run_end(self, findings: Sequence[Finding], *, failed: bool) -> None:
        """The rules have been evaluated on the complete run; it is about to be closed."""


class Output(Monitor):
    """Consumes the findings and records of a run: a part of the watch, which is called after all monitors."""

    requested_by = None


MONITORS: Registry[type[Monitor]] = Registry(
    "monitor",
    modules=("monitors/*/monitor.py", "monitors/*/*_monitor.py"),
    group="backlight.monitors",
    holds=Monitor,
)
"""Every monitor class, by name: those of backlight, then those of other distributions."""


def monitor_names() -> tuple[str, ...]:
    """Return the names that ``Settings.monitors`` may hold."""
    classes = (cls for _, cls in MONITORS.items())
    return tuple(sorted({cls.requested_by or cls.name for cls in classes if cls.requested_by is not None}))


def built_in_monitors() -> tuple[str, ...]:
    """Return the names of backlight's own monitors, without importing any of them or torch."""
    folders = (file.parent for file in (Path(__file__).parent / "monitors").glob("*/monitor.py"))
    return tuple(sorted(folder.name for folder in folders))


def check_monitors(names: Sequence[str], existing: Sequence[str] = ()) -> None:
    """Raise a SettingError for a name that no monitor has, of those that exist or of ``existing``."""
    existing = existing or monitor_names()
    for name in names:
        if name not in existing:
            expected = f"expected some of: {', '.join(existing)}"
            raise SettingError("monitors", f"no monitor is called {name!r}; {expected}")
