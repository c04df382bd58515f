"""The monitors of one run, and the calls of their hooks."""

from __future__ import annotations

import graphlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from backlight.capture.hub import HUB
from backlight.interrupts import is_interrupt, suppressed
from backlight.monitor import MONITORS, NEVER, Monitor, Output, RunHandle, Timed
from backlight.records import FROM_HERE_ON
from backlight.registry import warn
from backlight.session.outputs import CallbackOutput, LiveFindings, NotebookOutput, PrintOutput
from backlight.session.run_directory import FingerprintOutput
from backlight.session.stop import StopOutput
from backlight.session.trackers.output import TrackerOutput

if TYPE_CHECKING:
    from backlight.capture.hub import Listener
    from backlight.notifier import Notifier
    from backlight.session.settings import Settings

OUTPUTS: tuple[type[Output], ...] = (
    FingerprintOutput, CallbackOutput, PrintOutput, StopOutput, LiveFindings, NotebookOutput, TrackerOutput,
)  # fmt: skip
"""In their order: at the end of a run those behind :class:`LiveFindings` have the last new findings."""

HOOKS = ("wants_step", *(name for name in vars(Monitor) if name.startswith("on_")))


def requested_monitors(settings: Settings) -> list[Monitor]:
    """Return the monitors and outputs that the settings request.

    Monitors of backlight come first, by name, then those of other distributions, each behind those that it
    is to come after; outputs consume what monitors record, and come last.

    Raises
    ------
    ValueError
        If one of them refuses the settings.
    """
    monitors: list[Monitor] = []
    for name, cls in MONITORS.items():
        try:
            monitor = cls.from_settings(settings)
        except ValueError:
            raise
        except Exception as error:
            if is_interrupt(error):
                raise
            if MONITORS.origin(name) is None:
                raise
            warn(f"backlight: the monitor {name!r} is left out: {type(error).__name__}: {error}")
        else:
            monitors += [] if monitor is None else [monitor]
    outputs = [cls.from_settings(settings) for cls in OUTPUTS]
    return [*_ordered(monitors), *(output for output in outputs if output is not None)]


def _ordered(monitors: list[Monitor]) -> list[Monitor]:
    graph = {m.name: [name for name in m.after if any(name == o.name for o in monitors)] for m in monitors}
    by_name = {monitor.name: monitor for monitor in monitors}
    return [by_name[name] for name in graphlib.TopologicalSorter(graph).static_order()]


def check_use_of_samples(
    monitors: Iterable[Monitor], settings: Settings, *, has_samples: bool, is_script: bool
) -> None:
    """Refuse samples that no monitor uses, and outside of a script a monitor that lacks them."""
    if has_samples and not any(monitor.uses_samples for monitor in monitors):
        users = ", and for ".join(cls.samples_for for _, cls in MONITORS.items() if cls.samples_for)
        raise ValueError(f"watch: samples are for {users}, but monitors={settings.monitors}")
    for monitor in monitors:
        if monitor.needs_samples and not has_samples and not is_script:
            raise ValueError(f"watch: {monitor.needs_samples} needs samples=(loss_fn, batch) to split")


class MonitorSet:
    """Calls the hooks of monitors, in the given order.

    A monitor that raises is detached alone: one warning says what is no longer recorded, and the run
    continues.
    """

    def __init__(self, monitors: Iterable[Monitor], notifier: Notifier) -> None:
        self._monitors = tuple(monitors)
        self._notifier = notifier
        self._listeners: dict[str, list[Listener]] = {monitor.name: [] for monitor in self._monitors}
        self._attached: tuple[Monitor, ...] = ()
        self._disabled: list[Monitor] = []
        self._timed: list[Timed] = []
        self._lock = threading.Lock()
        self._calls: dict[str, tuple[tuple[Monitor, Callable[..., Any]], ...]] = {}

    def __iter__(self) -> Iterator[Monitor]:
        return iter(self._monitors)

    @property
    def want_backwards(self) -> bool:
        """Whether a monitor is to be called for every backward pass of a recorded step."""
        return any(monitor.wants_backwards for monitor in self._monitors)

    def attach(self, handle: Callable[[Monitor], RunHandle]) -> None:
        """Attach every monitor with a handle of its own; what one of them listens to is removed with it."""
        for monitor in self._monitors:
            self._attached = (*self._attached, monitor)
            self._calls = {"attach": ((monitor, monitor.attach),)}
            self.call("attach", handle(monitor))
        self._find_hooks()

    def detach(self, error: BaseException | None) -> None:
        """Detach every monitor, in their order."""
        attached, self._attached = self._attached, ()
        for monitor in attached:
            self._remove(monitor)
            with self._notifier.shield():
                monitor.detach(error)

    def call(self, hook: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a hook of every monitor that implements it; return what they returned."""
        returned: list[Any] = []
        for monitor, bound in self._calls.get(hook, ()):
            try:
                returned.append(bound(*args, **kwargs))
            except Exception as error:
                if is_interrupt(error):
                    raise
                self.disable(monitor, error)
                returned.append(None)
        return returned

    def account(self, timed: Timed) -> None:
        """Count the seconds of a thread or a device as a cost of the watch."""
        self._timed.append(timed)

    def next_step(self, step: int) -> int:
        """Return the first step after ``step`` whose start a monitor needs."""
        starting = {
            m.name: m for hook in ("on_step_start", "wants_step") for m, _ in self._calls.get(hook, ())
        }
        return min((m.next_step(step) for m in starting.values()), default=NEVER)

    def accounted(self) -> float:
        """Return the seconds that threads and devices have taken for the watch."""
        return sum([timed.spent for timed in self._timed])

    def listen(self, monitor: Monitor, listener: Listener) -> None:
        """Deliver raw events to a listener of ``monitor`` until that is detached."""
        if listener not in self._listeners[monitor.name]:
            self._listeners[monitor.name].append(listener)
        HUB.add(listener, on_error=partial(self.disable, monitor))

    def disable(self, monitor: Monitor, error: Exception) -> None:
        """Detach ``monitor`` alone after an error; warn what is no longer recorded."""
        with self._lock:  # hooks run on two threads
            if monitor in self._disabled:
                return
            self._disabled.append(monitor)
            self._find_hooks()
        self._remove(monitor)
        if monitor in self._attached:
            self._attached = tuple(other for other in self._attached if other is not monitor)
            with suppressed():
                monitor.detach(None)
        self._notifier.trouble(
            error,
            (monitor.records or monitor.name) + FROM_HERE_ON,
            is_data=monitor.requested_by is not None,
        )

    def _remove(self, monitor: Monitor) -> None:
        for listener in self._listeners[monitor.name]:
            HUB.remove(listener)

    def _find_hooks(self) -> None:
        # Only hooks that a monitor overrides: a step calls nothing that does nothing. Monitors that were
        # detached at the regular end of the run keep theirs, since the final hooks come later.
        calls: dict[str, list[tuple[Monitor, Callable[..., Any]]]] = {hook: [] for hook in HOOKS}
        for monitor in self._monitors:
            if monitor in self._disabled:
                continue
            for hook in HOOKS:
                if getattr(type(monitor), hook) is not vars(Monitor)[hook]:
                    calls[hook].append((monitor, getattr(monitor, hook)))
        self._calls = {hook: tuple(hooks) for hook, hooks in calls.items()}
