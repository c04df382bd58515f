"""Bases of the observers of a script: of its operations and the lines of their nodes, or of its steps."""

from __future__ import annotations

import contextlib
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from backlight.capture.calls import ModuleCalls
from backlight.capture.forward import ScopeForwards
from backlight.capture.hooks import Patches
from backlight.capture.hub import HUB, Listener
from backlight.capture.parameters import Scope
from backlight.capture.steps import StepTracker

if TYPE_CHECKING:
    from backlight.user_code import SourceLine


next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # not exported
"""Return the number of the next node of this thread."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a node: the operation, its line, the running module, and the line of a library inside."""

    operation: str
    line: SourceLine | None
    module: int = 0
    library_line: SourceLine | None = None


class Origins:
    """Origins by ranges of sequence numbers, added in rising order."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._origins: list[Origin] = []

    def add(self, begin: int, end: int, origin: Origin) -> None:
        """Record ``origin`` for the nodes ``begin`` to ``end - 1``."""
        if end > begin:
            at = bisect_right(self._begins, begin)
            self._begins.insert(at, begin)
            self._ends.insert(at, end)
            self._origins.insert(at, origin)

    def of(self, number: int) -> Origin | None:
        """Return the origin of the node with that sequence number, None if it was not recorded."""
        at = bisect_right(self._begins, number) - 1
        return self._origins[at] if at >= 0 and number < self._ends[at] else None

    def trim(self, limit: int) -> None:
        """Forget the oldest half if there are more than ``limit``."""
        if len(self._begins) > limit:
            kept = slice(-limit // 2, None)
            self._begins, self._ends = self._begins[kept], self._ends[kept]
            self._origins = self._origins[kept]

    def clear(self) -> None:
        """Forget everything."""
        self._begins.clear()
        self._ends.clear()
        self._origins.clear()


class Pausable:
    """Recorder of operations that records nothing while ``paused``; in forked children it stays paused."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        _RECORDERS.add(self)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Pause for the length of a ``with`` block."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


class OperationRecorder(Pausable):
    """Pausable recorder with the origins of nodes; it pauses for good after an exception of its own."""

    def __init__(self, calls: ModuleCalls, on_error: Callable[[Exception], None]) -> None:
        super().__init__()
        self._calls = calls
        self._on_error = on_error
        self.origins = Origins()

    def _module(self) -> int:
        """Return the ``id`` of the running module, 0 outside of all."""
        module = self._calls.current()
        return 0 if module is None else id(module)

    def _drop(self, error: Exception) -> None:
        self.paused = True
        self._on_error(error)


_RECORDERS: weakref.WeakSet[Pausable] = weakref.WeakSet()


def _pause_all() -> None:
    for recorder in _RECORDERS:
        recorder.paused = True


os.register_at_fork(after_in_child=_pause_all)


class ScriptObserver(Listener):
    """Observes the first optimizer steps of a script (None: all); a context manager around it.

    ``end`` is called when they are complete and is expected to raise what ends the script; ``notes`` hold
    what limits the answer.
    """

    uses_modes = True

    def __init__(self, max_steps: int | None, end: Callable[[], None]) -> None:
        self._max_steps = max_steps
        self._end = end
        self._calls = ModuleCalls()
        self._patches = Patches()
        self._contexts = contextlib.ExitStack()
        self._stepped = False
        self.steps = 0
        self.backwards = 0
        self.notes: list[str] = []

    def _record(self) -> Iterator[Any]:
        """Install patches, and yield the context managers to enter, outermost first."""
        raise NotImplementedError

    def _complete(self) -> None:
        """Complete the answer after the last operation."""

    def __enter__(self) -> Self:
        """Start to observe every model of the process."""
        HUB.add(self)
        self._contexts.enter_context(self._calls)
        for context in self._record():
            self._contexts.enter_context(context)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything and complete the answer."""
        self._contexts.close()
        self._patches.undo()
        HUB.remove(self)
        self._complete()

    def dropped(self, error: Exception) -> None:
        """Note that observing ended early."""
        note = f"observing stopped after {type(error).__name__}: {error}; what follows is not known"
        if note not in self.notes:
            self.notes.append(note)

    def _begins_step(self) -> bool:
        """Return whether the backward pass that begins is the first of another step, and count that."""
        # Where no optimizer can end a step, each backward is one.
        if not (self._stepped or (self.backwards and not HUB.optimizers.alive())):
            return False
        self._stepped = False
        self.steps += 1
        return True

    def _is_over(self) -> bool:
        return self._max_steps is not None and self.steps >= self._max_steps


class StepObserver(StepTracker):
    """Follows the steps and the models of a script, and ends it with ``stop``; a context manager around it.

    ``forwards`` follows the models that the script trains; ``trouble`` lists what is missing, and why.
    """

    uses_modes = True

    def __init__(self, stop: Callable[[], None]) -> None:
        self.scope = Scope()
        super().__init__(self.scope)
        self.forwards = ScopeForwards(self.scope, keeps=True)
        self.trouble: list[str] = []
        self._stop = stop

    def on_finish(self) -> None:
        """Handle the end of the script; the hooks are still attached."""

    def step_opens(self, index: int) -> bool:
        """Observe every step."""
        return True

    def __enter__(self) -> Self:
        """Attach; the tracker first, so that a step is closed before anything else of the next is seen."""
        self.start()
        self.forwards.start(self.dropped)
        return self

    def __exit__(self, *exception: object) -> None:
        """Detach everything."""
        self.finish()
        self.on_finish()
        self.forwards.stop()

    def dropped(self, error: Exception) -> None:
        """Note that following the steps ended early."""
        self.trouble.append(f"following the steps stopped after {type(error).__name__}: {error}")
