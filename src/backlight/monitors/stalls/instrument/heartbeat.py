"""Heartbeats and backward position of the training process, written to the shared state as they happen.

Nothing here waits or reads a device. Backward, optimizer, clipping and batches are events of the capture.
Inside backward a hook on each parameter records the gradients that have arrived, and the entry of custom
functions, which are Python, records which of them is at work since when.

The position of a backward pass is counted in autograd nodes, without a walk of the graph on an ordinary step.
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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import function

from backlight import clock
from backlight.capture.hooks import Patches
from backlight.capture.hub import HUB, Listener
from backlight.capture.loss_graph import sequence_number
from backlight.capture.unrecorded import BOARD_LENGTH, NUMBERS, write_phase
from backlight.records import Phase
from backlight.watchdog.graph_samples import GraphBuild
from backlight.watchdog.shared_state import MAX_ROWS, SharedState, Slot

if TYPE_CHECKING:
    from backlight.capture.parameters import Scope


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
_now = clock.monotonic_ns


next_number = sequence_number or (lambda: -1)
"""Returns the sequence number of the next node of this thread, -1 where torch does not provide it."""


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
        numbers = [
            number
            for root in roots
            if root.grad_fn is not None and (number := root.grad_fn._sequence_nr()) < _NEVER
        ]
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

    def pause(self) -> None:
        """Hook no node until :meth:`resume`: begins of backward passes are not reported."""
        with self._lock:
            self._sealed = _NEVER

    def resume(self) -> None:
        """Count from here on."""
        self.end(0.0)
        with self._lock:
            self._sealed = self._base

    def end(self, seconds: float, *, keeps: bool = False) -> None:
        """Forget the graph, unless it ``keeps`` growing, as after ``torch.autograd.grad``."""
        self._due = self._due or seconds > SLOW_BACKWARD_S
        self._root = -1
        if keeps:
            return
        self._base = next_number()  # after the nodes of recomputation inside backward
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
        deadline = clock.perf_counter() + WALK_TIMEOUT_S
        wanted = self._root
        while node is not None and len(self._hooked) < WALK_HOOKS and clock.perf_counter() < deadline:
            number = _number(node)
            if number <= wanted:
                self._hook(node, number)
                wanted = number - spacing
            below = [(n._sequence_nr(), n) for n, _ in node.next_functions if n is not None]
            below = [pair for pair in below if pair[0] < _NEVER]
            node = max(below, key=lambda pair: pair[0])[1] if below else None

    def sample(self, stack: tuple[Any, ...] = ()) -> bool:
        """Hook the newest node, from the sampler thread; return whether there are new ones."""
        # A new tensor is among the collector's young objects.
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
            # Only where no backward has begun: the engine must not meet a node that is being changed.
            with self._lock:
                if newest >= self._sealed:
                    self._hook(node, newest)
        return True

    def graph_build(self) -> GraphBuild:
        """Return the samples of the construction of this graph."""
        samples = list(self._made)
        stacks = list(dict.fromkeys(stack for _, stack in samples))
        index = {stack: i for i, stack in enumerate(stacks)}
        numbered = tuple((number, index[stack]) for number, stack in samples)
        return GraphBuild(self._base, self._root, numbered, tuple(stacks))


def _number(node: Any) -> int:
    return int(node._sequence_nr()) if node is not None else -1


_DATA, _BACKWARD, _OTHER, _EVALUATION, _CHECKPOINT = (
    NUMBERS[phase] for phase in (Phase.DATA, Phase.BACKWARD, Phase.OTHER, Phase.EVALUATION, Phase.CHECKPOINT)
)

# Plain numbers for what runs hundreds of times in a step: looking a member up costs as much as the store.
_ROW, _REACHED, _CALLS = int(Slot.ROW), int(Slot.REACHED), int(Slot.NODE_CALLS)
_PROGRESS, _BEAT, _SINCE = int(Slot.PROGRESS), int(Slot.HEARTBEAT), int(Slot.NODE_SINCE)


class Heartbeat(Listener):
    """Writes the shared state of this process.

    ``on_parameters`` is called with the names of the watched parameters after a change, ``on_buckets`` at the
    begin of the first backward passes, until it returns False: DDP rebuilds its buckets.
    """

    def __init__(
        self,
        shared_state: SharedState,
        scope: Scope,
        on_parameters: Callable[[tuple[str, ...]], None],
        on_buckets: Callable[[], bool] | None = None,
    ) -> None:
        self.shared_state = shared_state
        self.position = BackwardPosition(shared_state)
        self._slots = shared_state.slots
        self._scope = scope
        self._on_parameters = on_parameters
        self._on_buckets = on_buckets
        self._hooked: object = None
        self._named: object = None
        self._counted = [0, 0, 0]  # progress, phase and backward passes
        self.is_counting = False
        self._handles: list[Any] = []
        self._patches = Patches()
        self._names: dict[type, bytes] = {}
        self._training_data = 0
        self._source = 0
        self._expected = 0
        self._before = _OTHER
        self._began = 0
        self._zeros = b""

    every_step = False

    def unrecorded_begin(self) -> None:
        """From here on the hooks write what they do on the board, without times and gradients."""
        self._unhook()
        self.position.pause()
        slots = self._slots
        slots[Slot.ROW] = slots[Slot.REACHED] = slots[Slot.EXPECTED] = slots[Slot.NODE_SINCE] = 0
        slots[Slot.NODES_TOTAL] = slots[Slot.NODES_DONE] = slots[Slot.BACKWARD_IDENT] = 0
        self.is_counting = True

    def unrecorded_end(self) -> None:
        """Follow phases and gradients again."""
        self.is_counting = False
        self.position.resume()
        self.observe_progress(_now())

    def observe_progress(self, now: int) -> None:
        """Note progress on the board that has no time of its own: a call, or another phase."""
        slots = self._slots
        progress, *counts = slots[Slot.PROGRESS], slots[Slot.PHASE], slots[Slot.BACKWARDS]
        if [progress, *counts] != self._counted:
            if progress == self._counted[0]:  # a backward pass has begun, which is not counted
                slots[Slot.PROGRESS] = progress = progress + 1
            self._counted = [progress, *counts]
            slots[Slot.HEARTBEAT] = slots[Slot.PHASE_SINCE] = now

    def attach(self) -> None:
        """Patch the entry of custom functions, and ``torch.save``."""
        base = getattr(function, "BackwardCFunction", None)
        if base is not None:
            self._patches.replace(base, "apply", self._wrap_node)
        self._patches.replace(torch, "save", self._wrap_save)
        HUB.board = self._slots[Slot.HEARTBEAT : Slot.HEARTBEAT + BOARD_LENGTH]

    def detach(self) -> None:
        """Remove patches and hooks."""
        self._patches.undo()
        self._unhook()
        HUB.board = [0] * BOARD_LENGTH

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooked = [], None

    # Phases

    def _enter(self, phase: int) -> None:
        write_phase(HUB.board, phase, _now())

    def batch_begin(self, source: int) -> None:
        """Only a wait for the training data ends an evaluation."""
        self._source = source
        if self._slots[Slot.PHASE] == _EVALUATION and source == self._training_data:
            self._enter(_DATA)

    def batch_raised(self, error: BaseException) -> None:
        """Waiting for data failed: where that ends the training run, it ends in this phase."""
        self._enter(_DATA)

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Backward begins: count its nodes, and the gradients that arrive."""
        self._prepare_backward()
        self._began = _now()
        self.position.begin(roots)

    def backward_end(self) -> None:
        """Backward has returned or raised."""
        self.position.end((_now() - self._began) / 1e9)
        self._slots[Slot.BACKWARDS] += 1
        self._slots[Slot.NODE_SINCE] = 0

    def backward_raised(self, error: BaseException) -> None:
        """Backward ends with an exception, which is no progress."""
        self._slots[Slot.RAISED] += 1

    def nested_begin(self) -> None:
        """A backward pass begins inside another: the engine owns its nodes now."""
        self.position.seal()

    def grad_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """``torch.autograd.grad`` begins, in which no parameter gets a gradient."""
        slots = self._slots
        self._before = slots[Slot.PHASE]
        slots[Slot.ROW] = slots[Slot.REACHED] = slots[Slot.NODE_SINCE] = slots[Slot.EXPECTED] = 0
        slots[Slot.BACKWARD_IDENT] = threading.get_ident()
        self._enter(_BACKWARD)
        self._began = _now()
        self.position.begin(roots)

    def grad_end(self) -> None:
        """It has returned; the graph may continue to grow, as for a gradient penalty."""
        self.position.end((_now() - self._began) / 1e9, keeps=True)
        self._slots[Slot.NODE_SINCE] = 0
        self._enter(self._before)

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has returned: a step is complete."""
        self._slots[Slot.STEP] += 1

    # Inside backward

    def _prepare_backward(self) -> None:
        self._training_data = self._source
        if self._hooked is not self._scope.table or not self._scope.table.records:
            self._follow_parameters()
        if self._on_buckets is not None and not self._on_buckets():
            self._on_buckets = None
        slots = self._slots
        slots[Slot.ROW] = slots[Slot.REACHED] = slots[Slot.NODE_SINCE] = 0
        slots[Slot.EXPECTED] = self._expected
        self.shared_state.rows[: len(self._zeros)] = self._zeros
        slots[Slot.BACKWARD_IDENT] = ident = threading.get_ident()
        if slots[Slot.MAIN_IDENT] != ident:  # as in Ray Train, which trains in a thread of its own
            slots[Slot.MAIN_IDENT], slots[Slot.MAIN_TID] = ident, threading.get_native_id()

    def _follow_parameters(self) -> None:
        if not self._scope.table.records:
            self._scope.refresh()
        table = self._scope.table
        if not table.records:
            return
        names = tuple(record.name for record in table.records)
        tensors = [table.tensor(row) for row in range(len(table))]
        self._unhook()
        self._hooked = table
        arrived = functools.partial(_arrived, self._slots, self.shared_state.rows)
        for row, tensor in enumerate(tensors):
            if tensor is not None and tensor.requires_grad and tensor.is_leaf:
                self._handles.append(
                    tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # as torch has it
                        functools.partial(arrived, row + 1)
                    )
                )
        self._zeros = bytes(min(len(names), MAX_ROWS))
        self._slots[Slot.ROWS] = len(self._zeros)
        self._expected = len(self._handles)
        self._slots[Slot.DEVICE] = any(t is not None and t.device.type != "cpu" for t in tensors)
        if table.records != self._named:  # reinforcement learning makes an equal table at every step
            self._named = table.records
            self._on_parameters(names)

    def _wrap_node(self, original: Any) -> Any:
        slots, shared_state, names, position = self._slots, self.shared_state, self._names, self.position

        @functools.wraps(original)
        def apply(node: Any, *args: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(node, *args)
            kind = type(node)
            name = names.get(kind)
            if name is None:
                name = names[kind] = kind.__name__.encode("utf-8", "replace")
            outer = slots[_SINCE]
            shared_state.write_node(name)
            position.reach(node._sequence_nr())
            slots[_CALLS] += 1
            slots[_PROGRESS] += 1
            slots[_BEAT] = slots[_SINCE] = _now()
            try:
                return original(node, *args)
            finally:
                slots[_SINCE] = outer
                slots[_PROGRESS] += 1
                slots[_BEAT] = _now()

        return apply

    def _wrap_save(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            before = self._slots[Slot.PHASE]
            self._enter(_CHECKPOINT)
            try:
                return original(*args, **kwargs)
            finally:
                self._enter(before)

        return save


def _arrived(slots: memoryview, rows: memoryview, row: int, _parameter: torch.Tensor) -> None:
    slots[_ROW] = row
    if row <= MAX_ROWS:
        rows[row - 1] = 1
    slots[_REACHED] += 1
    slots[_PROGRESS] += 1
    slots[_BEAT] = _now()
