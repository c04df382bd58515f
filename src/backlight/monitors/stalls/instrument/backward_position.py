"""How far a backward is, in autograd nodes, without walking the graph on an ordinary step.

The engine runs nodes by falling sequence number, and torch gives the number of the next node for the
price of a function call. So the total is known before backward begins, and a node that tells its own number
when it runs tells the position. Which nodes are asked:

- custom functions, whose entry is Python anyway;
- where building the graph takes long enough for it to matter, nodes that were just made when a helper thread
  looked, a few per second: evenly spread in time, however many nodes there are;
- where it was quick, in the first backward and after a slow one, nodes found by a walk of a few milliseconds.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from backlight.monitors.stalls.model.shared_state import SharedState, Slot

WALK_SECONDS = 0.02
"""Time that a walk may take, in a first backward and after a slow one."""

SLOW_SECONDS = 1.0
"""A backward that took longer is worth a walk the next time."""

HOOKS = 64
"""Nodes that a walk asks to tell their position."""

MOST_HOOKS = 4096
"""Nodes that the helper thread asks in one step."""

MOST_LOOKS = 512
"""Looks at the building of one graph that are kept; of more, every second one."""

MOST_YOUNG = 50_000
"""Young objects beyond which the helper does not look through them: the collector is switched off."""

_NEVER = 2**63
_now = time.monotonic_ns


def next_number() -> int:
    """Return the sequence number that the next node of this thread gets, -1 where torch does not say."""
    read = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return -1 if read is None else int(read())


class BackwardPosition:
    """Counts nodes of the backward under way."""

    def __init__(self, board: SharedState) -> None:
        self._slots = board.slots
        self._lock = threading.Lock()
        self._root = -1
        self._base = next_number()
        self._asked: set[int] = set()
        self._due = True
        self._sealed = 0
        self._made: list[tuple[int, tuple[Any, ...]]] = []

    def begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Count what lies before a backward from ``roots``."""
        self.seal()
        numbers = [root.grad_fn._sequence_nr() for root in roots if root.grad_fn is not None]
        numbers = [number for number in numbers if number < _NEVER]
        self._root = max(numbers, default=-1)
        slots = self._slots
        slots[Slot.NODES_DONE] = 0
        slots[Slot.NODES_TOTAL] = max(self._root - self._base + 1, 0) if numbers else 0
        if self._due and not self._asked and numbers:
            self._due = False
            self._walk(max(roots, key=lambda root: _number(root.grad_fn)).grad_fn)
        slots[Slot.HOOKS] = len(self._asked)

    def seal(self) -> None:
        """Leave the nodes that there are to the engine, also where a backward begins inside another."""
        with self._lock:
            # Threads count apart, and none may ever be asked for what the engine of another works on.
            self._sealed = max(self._sealed, next_number())

    def end(self, seconds: float, *, keeps: bool = False) -> None:
        """Forget the graph, unless it ``keeps`` growing, as after ``torch.autograd.grad``.

        Recomputation inside backward has made nodes that are not the next step's.
        """
        self._due = self._due or seconds > SLOW_SECONDS
        self._root = -1
        if keeps:
            return
        self._base = next_number()
        self._asked.clear()
        self._made = []

    def at(self, number: int) -> None:
        """Note that the node with this number is at work."""
        done = self._root - number
        if 0 <= done < self._slots[Slot.NODES_TOTAL] or self._root < 0:
            self._slots[Slot.NODES_DONE] = max(self._slots[Slot.NODES_DONE], done)

    def _tell(self, number: int, *_grads: Any) -> None:
        self.at(number)
        self._slots[Slot.PROGRESS] += 1
        self._slots[Slot.HEARTBEAT] = _now()

    def _ask(self, node: Any, number: int) -> None:
        self._asked.add(number)
        node.register_prehook(functools.partial(self._tell, number))

    def _walk(self, node: Any) -> None:
        """Follow the highest numbers down for a bounded time. No wrapper of a node outlives its turn."""
        spacing = max(self._slots[Slot.NODES_TOTAL] // HOOKS, 1)
        deadline = time.perf_counter() + WALK_SECONDS
        wanted = self._root
        while node is not None and len(self._asked) < HOOKS and time.perf_counter() < deadline:
            number = _number(node)
            if number <= wanted:
                self._ask(node, number)
                wanted = number - spacing
            below = [(n._sequence_nr(), n) for n, _ in node.next_functions if n is not None]
            below = [pair for pair in below if pair[0] < _NEVER]
            node = max(below, key=lambda pair: pair[0])[1] if below else None

    def sample(self, stack: tuple[Any, ...] = ()) -> bool:
        """From the helper thread, while a graph is being built: ask the newest node for its position.

        A new tensor stands among the collector's young objects. Hooks are only added to nodes that no
        backward has begun with, under a lock that each begin takes, so that the engine never meets a node
        that is being changed. ``stack`` is where the training is; return whether nodes have been made since
        the last look.
        """
        if gc.get_count()[0] > MOST_YOUNG:
            return False
        newest, node = -1, None
        for tensor in [o for o in gc.get_objects(generation=0) if type(o) is torch.Tensor]:
            candidate = tensor.grad_fn
            if candidate is not None:
                number = _number(candidate)
                if newest < number < _NEVER:
                    newest, node = number, candidate
        made = self._made
        if node is None or newest < max(self._base, made[-1][0] + 1 if made else 0):
            return False
        made.append((newest, stack))
        if len(made) > MOST_LOOKS:
            del made[1::2]
        if newest not in self._asked and len(self._asked) < MOST_HOOKS:
            with self._lock:
                if newest >= self._sealed:
                    self._ask(node, newest)
        return True

    def graph_build(self) -> dict[str, Any]:
        """Return what the looks at the building of this graph have seen."""
        samples = list(self._made)
        stacks = list(dict.fromkeys(stack for _, stack in samples))
        runtime_directories = {stack: place for place, stack in enumerate(stacks)}
        return {
            "base": self._base,
            "root": self._root,
            "samples": [[number, runtime_directories[stack]] for number, stack in samples],
            "stacks": stacks,
        }


def _number(node: Any) -> int:
    return int(node._sequence_nr()) if node is not None else -1
