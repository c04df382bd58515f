"""What checks share: the steps that are observed, facts that are recorded, and weights from files."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from backlight.capture.hub import HUB, Listener
from backlight.capture.modules import named_parameters
from backlight.monitors.correctness.instrument.samples import PendingCopies, Snapshot
from backlight.monitors.correctness.model.facts import Fact, encode
from backlight.registry import Registry

if TYPE_CHECKING:
    from backlight.monitor import RunHandle

FIRST_STEPS = 8
"""Steps at the start of a run that are all observed."""

GROWTH = 1.6
"""Factor between the starts of later observations."""

WINDOW_STEPS = 2
"""Steps in a row of a later observation: many facts compare one step with the next."""

MAX_REPORTS = 16
"""Contradictions of one kind that a process records."""


class TensorSet:
    """Tensors by identity, none of which it keeps alive."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor."""
        if tensor not in self:
            self._references[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        reference = self._references.get(id(tensor))
        return reference is not None and reference() is tensor


class LoadedWeights(Listener):
    """Remembers the parameters that a state was loaded into; checks share one.

    Transformers puts the tensors of a file in place without ``load_state_dict``: its models name the file.
    """

    every_step = False

    def __init__(self) -> None:
        self._loaded = TensorSet()

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Remember the parameters of a module that its state names."""
        missing = set(getattr(result, "missing_keys", ()))
        for name, parameter in module.named_parameters():
            if name in state and name not in missing:
                self._loaded.add(parameter)

    def holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether the values of one of these parameters come from a file."""
        wanted = list(parameters)
        if any(parameter in self._loaded for parameter in wanted):
            return True
        keys = set(map(id, wanted))
        return any(
            getattr(vars(root).get("config"), "_name_or_path", "")
            and any(id(named.parameter) in keys for named in named_parameters(root))
            for root in HUB.seen.roots()
        )


class Schedule:
    """Which steps are observed: the first ones, then windows of a few steps at growing intervals.

    ``due`` is whether this step is, ``near`` whether it or the step before or after it is, ``observed`` how
    many steps were. ``copies`` are those of all checks, ``loaded`` the weights that come from a file.
    """

    def __init__(self) -> None:
        self._begin = round(FIRST_STEPS * GROWTH)
        self.due = self.near = True
        self.observed = 0
        self.copies = PendingCopies()
        self.loaded = LoadedWeights()

    def begin(self, step: int) -> None:
        """Decide about ``step``; steps only grow."""
        self.observed += self.due and step > 0  # the step before, which is over
        while step > self._begin + WINDOW_STEPS:
            self._begin = max(round(self._begin * GROWTH), self._begin + WINDOW_STEPS)
        end = self._begin + WINDOW_STEPS
        self.due = step < FIRST_STEPS or self._begin <= step < end
        self.near = step <= FIRST_STEPS or self._begin - 1 <= step <= end

    def next_step(self, step: int) -> int:
        """Return the first step after ``step`` about which something is to be decided."""
        return step + 1 if self.near else max(step + 1, self._begin - 1)


class Check(Listener):
    """Observes facts of one kind as a run goes on, and reports those that contradict each other.

    What is compared on a device is copied from there without waiting; the report follows when the copy has
    arrived. Events come of ``steps`` that are observed and of those beside them, in all ``windows`` or in
    the ``first`` one only; or of ``all``. A check that ``needs_ranks`` is left out of a run of one process.
    The facts, with the rule that reads them and its limits, are in the module of ``rules`` without torch.
    """

    name: ClassVar[str]
    steps: ClassVar[Literal["windows", "first", "all"]] = "windows"
    needs_ranks = False
    every_step = False

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a public name that is none of a check: such a hook would never be called."""
        for name in vars(cls):
            if not name.startswith("_") and name != "name" and not hasattr(Check, name):
                raise TypeError(f"{cls.__name__}: no event and no option of a check is called {name!r}")

    def __init__(self, run: RunHandle, schedule: Schedule) -> None:
        self.run, self.schedule = run, schedule
        self._reports: Counter[type[Fact]] = Counter()
        self._start()

    def _start(self) -> None:
        """Prepare; no event has come."""

    @property
    def reads_gradients(self) -> bool:
        """Whether this step is observed, or one beside it."""
        return self.schedule.near

    @property
    def due(self) -> bool:
        """Whether this step is observed; while several threads train, weights change at any time."""
        return self.schedule.due and not HUB.training.missed

    def forget(self) -> None:
        """Drop what waits for a later event: the next events are not delivered."""

    def record(self, fact: Fact) -> None:
        """Record a fact."""
        self.run.notifier.event(fact.event, encode(fact), fact.step)

    def report(self, fact: Fact) -> None:
        """Record a contradiction, unless there are many of its kind."""
        self._reports[type(fact)] += 1
        if self._reports[type(fact)] <= MAX_REPORTS:
            self.record(fact)
            self.run.fact(fact.rule, fact.kind)

    @property
    def step(self) -> int:
        """The step in progress."""
        return self.run.clock.index

    def when_known(self, then: Callable[..., None], *values: torch.Tensor) -> None:
        """Call ``then`` with the arrays of ``values``, as soon as they and all earlier ones are on the host.

        Nothing may change the values until the step is over.
        """
        self.schedule.copies.add(then, *values)

    def snapshot(
        self,
        samples: Sequence[torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Snapshot:
        """Copy samples of tensors; they are on the host when a later :meth:`when_known` calls back."""
        taken = Snapshot(samples, change)
        self.when_known(taken.arrive, *taken.tables)
        return taken

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter, empty where the table does not hold it."""
        table = self.run.scope.table
        row = table.row(parameter)
        return "" if row is None else table.records[row].name


CHECKS: Registry[type[Check]] = Registry(
    "check", modules=("monitors/correctness/instrument/*.py",), holds=Check
)
"""The checks, each of which listens to the events of the process."""
