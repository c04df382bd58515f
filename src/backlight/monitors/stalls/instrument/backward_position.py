"""Position of a backward pass, in autograd nodes, without a walk of the graph on an ordinary step.

The engine runs nodes by falling sequence number, and torch returns the number of the next node for the price
of a function call. So the total is known before backward begins, and a hooked node that runs gives the
position. Hooked are:

- custom functions, whose entry is Python anyway;
- while building the graph takes long, the newest node at each sample of the sampler thread, a few per second:
  evenly spread in time, however many nodes there are;
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

WALK_TIMEOUT_S = 0.02
"""Time that a walk may take, in a first backward and after a slow one."""

SLOW_BACKWARD_S = 1.0
"""Duration of a backward after which the next one is walked."""

WALK_HOOKS = 64
"""Nodes that a walk hooks."""

MAX_HOOKS = 4096
"""Nodes that the sampler thread hooks in one step."""

MAX_SAMPLES = 512
"""Samples of the construction of one graph that are kept; of more, every second one."""

MAX_YOUNG_OBJECTS = 50_000
"""Young objects beyond which they are not searched: the garbage collector is switched off."""

_NEVER = 2**63
_now = time.monotonic_ns


def next_number() -> int:
    """Return the sequence number of the next node of this thread, -1 where torch does not provide it."""
    read = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return -1 if read is None else int(read())


class BackwardPosition:
    """Counts the nodes of the current backward pass."""

    def __init__(self, shared_state: SharedState) -> None:
        self._slots = shared_state.slots
        self._lock = threading.Lock()
        self._root = -1
        self._base = next_number()
        self._hooked: set[int] = set()
        self._due = True
        self._sealed = 0
        self._made: list[tuple[int, tuple[Any, ...]]] = []

    def begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Count the nodes of a backward pass from ``roots``."""
        self.seal()
        numbers = [root.grad_fn._sequence_nr() for root in roots if root.grad_fn is not None]
        numbers = [number for number in numbers if number < _NEVER]
        self._root = max(numbers, default=-1)
        slots = self._slots
        slots[Slot.NODES_DONE] = 0
        slots[Slot.NODES_TOTAL] = max(self._root - self._base + 1, 0) if numbers else 0
        if self._due and not self._hooked and numbers:
            self._due = False
            self._walk(max(roots, key=lambda root: _number(root.grad_fn)).grad_fn)
        slots[Slot.POSITION_HOOKS] = len(self._hooked)

    def seal(self) -> None:
        """Leave the existing nodes to the engine, also where a backward begins inside another."""
        with self._lock:
            # Threads count separately, and no node may be hooked on which the engine of another thread works.
            self._sealed = max(self._sealed, next_number())

    def end(self, seconds: float, *, keeps: bool = False) -> None:
        """Forget the graph, unless it ``keeps`` growing, as after ``torch.autograd.grad``.

        Recomputation inside backward has made nodes that are not the next step's.
        """
        self._due = self._due or seconds > SLOW_BACKWARD_S
        self._root = -1
        if keeps:
            return
        self._base = next_number()
        self._hooked.clear()
        self._made = []

    def reach(self, number: int) -> None:
        """Record that the node with this number runs."""
        done = self._root - number
        if 0 <= done < self._slots[Slot.NODES_TOTAL] or self._root < 0:
            self._slots[Slot.NODES_DONE] = max(self._slots[Slot.NODES_DONE], done)

    def _on_node(self, number: int, *_grads: Any) -> None:
        self.reach(number)
        self._slots[Slot.PROGRESS] += 1
        self._slots[Slot.HEARTBEAT] = _now()

    def _hook(self, node: Any, number: int) -> None:
        self._hooked.add(number)
        node.register_prehook(functools.partial(self._on_node, number))

    def _walk(self, node: Any) -> None:
        """Follow the highest numbers down for a bounded time. No Python wrapper of a node is kept."""
        spacing = max(self._slots[Slot.NODES_TOTAL] // WALK_HOOKS, 1)
        deadline = time.perf_counter() + WALK_TIMEOUT_S
        wanted = self._root
        while node is not None and len(self._hooked) < WALK_HOOKS and time.perf_counter() < deadline:
            number = _number(node)
            if number <= wanted:
                self._hook(node, number)
                wanted = number - spacing
            below = [(n._sequence_nr(), n) for n, _ in node.next_functions if n is not None]
            below = [pair for pair in below if pair[0] < _NEVER]
            node = max(below, key=lambda pair: pair[0])[1] if below else None

    def sample(self, stack: tuple[Any, ...] = ()) -> bool:
        """Hook the newest node, from the sampler thread; return whether there are new ones.

        A new tensor is among the collector's young objects. Hooks are only added to nodes with which no
        backward has begun, under a lock that each begin takes, so that the engine never meets a node that is
        being changed. ``stack`` is that of the training thread.
        """
        if gc.get_count()[0] > MAX_YOUNG_OBJECTS:
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
        if len(made) > MAX_SAMPLES:
            del made[1::2]
        if newest not in self._hooked and len(self._hooked) < MAX_HOOKS:
            with self._lock:
                if newest >= self._sealed:
                    self._hook(node, newest)
        return True

    def graph_build(self) -> dict[str, Any]:
        """Return the samples of the construction of this graph, as a document."""
        samples = list(self._made)
        stacks = list(dict.fromkeys(stack for _, stack in samples))
        index = {stack: i for i, stack in enumerate(stacks)}
        return {
            "base": self._base,
            "root": self._root,
            "samples": [[number, index[stack]] for number, stack in samples],
            "stacks": stacks,
        }


def _number(node: Any) -> int:
    return int(node._sequence_nr()) if node is not None else -1
