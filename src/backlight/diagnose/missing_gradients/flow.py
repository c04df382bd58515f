"""Queries on a tape: the path of a parameter's value, its cuts, and writes to saved tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backlight.capture.forked_child import ChildError, in_child
from backlight.diagnose.missing_gradients.tape import Operation
from backlight.user_code import SourceLine

if TYPE_CHECKING:
    import torch


WALK_TIMEOUT_S = 300.0
"""Time after which an unfinished walk is ended."""


class WalkError(RuntimeError):
    """The graph could not be walked; the message says why."""


@dataclass(frozen=True)
class Graph:
    """The nodes that one backward would visit, by index in the order of the walk: roots first."""

    sequence: tuple[int, ...]  # number of each node; -1 for the accumulation of a leaf's gradient
    edges: tuple[tuple[int, ...], ...]  # node per input, -1 where that input needs no gradient
    leaves: dict[int, int]  # the accumulating node by `id` of the leaf tensor

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.sequence)

    def reaches(self, leaf: torch.Tensor) -> bool:
        """Whether backward would arrive at ``leaf``."""
        return id(leaf) in self.leaves

    def below(self, start: int) -> set[int]:
        """Return every node that backward visits from node ``start`` on, itself included."""
        seen, stack = {start}, [start]
        while stack:
            for node in self.edges[stack.pop()]:
                if node >= 0 and node not in seen:
                    seen.add(node)
                    stack.append(node)
        return seen


def walk(roots: Iterable[torch.Tensor]) -> Graph:
    """Walk the graph behind ``roots`` in a forked child; raise WalkError where that fails."""
    tensors = [root for root in roots if root.requires_grad]
    try:
        answer = in_child(lambda: _walk(tensors), WALK_TIMEOUT_S)
    except ChildError as error:
        raise WalkError(f"the walk of the autograd graph {error}") from None
    leaves = {int(leaf): node for leaf, node in answer["leaves"].items()}
    return Graph(tuple(answer["sequence"]), tuple(map(tuple, answer["edges"])), leaves)


def _walk(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    index: dict[Any, int] = {}
    sequence, edges, pending = [], [], []
    leaves: dict[int, int] = {}

    def number(node: Any) -> int:
        place = index.get(node)
        if place is None:
            place = index[node] = len(index)
            pending.append(node)
        return place

    for tensor in tensors:
        node = tensor.grad_fn
        if node is None:  # a leaf
            node = tensor.expand_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        number(node)
    for done, node in enumerate(pending):  # which grows
        is_leaf = node.name().endswith("AccumulateGrad")
        variable = getattr(node, "variable", None) if is_leaf else None
        if variable is not None:
            leaves[id(variable)] = done
        sequence.append(-1 if variable is not None else node._sequence_nr())
        edges.append([-1 if edge is None else number(edge) for edge, _ in node.next_functions])
    return {"sequence": sequence, "edges": edges, "leaves": leaves}


REENTRANT = "CheckpointFunction"
"""Class of torch's re-entrant checkpoint, whose ``forward`` does not record by design."""

_EXITS = frozenset({"numpy", "__array__", "tolist", "item", "__dlpack__", "__float__"})
"""Operations that take a value out of torch."""


@dataclass
class Use:
    """Path of a value as far as a gradient can come back: positions on the tape, in order."""

    operations: list[int] = field(default_factory=list)  # that used it or a value computed from it
    cuts: list[int] = field(default_factory=list)  # at which it came out without a gradient
    hidden: list[int] = field(default_factory=list)  # in custom functions, where autograd does not record


class Flow:
    """An index over the operations of a tape."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self._consumers: dict[int, list[int]] = {}
        self._producers: dict[int, list[int]] = {}
        for position, operation in enumerate(operations):
            for number in set(operation.inputs):
                self._consumers.setdefault(number, []).append(position)
            for number in set(operation.outputs):
                self._producers.setdefault(number, []).append(position)

    def producer(self, number: int) -> Operation | None:
        """Return the first operation that computed a tensor, None if it was not recorded."""
        made = self._producers.get(number)
        return self.operations[made[0]] if made else None

    def behind(self, numbers: Iterable[int]) -> set[int]:
        """Return every tensor that the given ones were computed from, gradient or not."""
        seen = set(numbers)
        stack = list(seen)
        while stack:
            for position in self._producers.get(stack.pop(), ()):
                for number in self.operations[position].inputs:
                    if number not in seen:
                        seen.add(number)
                        stack.append(number)
        return seen

    def use(self, number: int) -> Use:
        """Follow one leaf through every operation as long as a gradient could come back."""
        use = Use()
        seen, visited, stack = {number}, set(), [number]
        while stack:
            for position in self._consumers.get(stack.pop(), ()):
                if position in visited:
                    continue
                visited.add(position)
                operation = self.operations[position]
                if any(n == number for n, _ in operation.changed):
                    continue  # a leaf is filled, as initialisation does: that is no use of its value
                use.operations.append(position)
                # Hidden, not a cut: whether the function's own output carries a gradient counts.
                if operation.inside >= 0 and not operation.enabled:
                    use.hidden.append(position)
                    continue
                if operation.cut:
                    use.cuts.append(position)
                    continue
                if not operation.carries:
                    continue
                for output in operation.outputs:
                    if output not in seen:
                        seen.add(output)
                        stack.append(output)
        use.operations.sort()
        use.cuts.sort()
        use.hidden.sort()
        return use

    def outermost(self, position: int) -> Operation:
        """Return the outermost custom function around an operation."""
        operation = self.operations[position]
        while operation.inside >= 0:
            operation = self.operations[operation.inside]
        return operation

    def in_checkpoint(self, position: int) -> Operation | None:
        """Return the re-entrant checkpoint around an operation, or None."""
        operation = self.operations[position]
        while operation.inside >= 0:
            operation = self.operations[operation.inside]
            if operation.name == REENTRANT:
                return operation
        return None

    def leaves_torch(self, position: int) -> Operation | None:
        """Return the operation that takes the output of a cut out of torch, or None."""
        operation = self.operations[position]
        if operation.cut == "numpy":
            return operation
        for number in operation.outputs:
            for later in self._consumers.get(number, ()):
                if self.operations[later].name in _EXITS:
                    return self.operations[later]
        return None


# In-place errors: the message of torch holds shape and versions of the tensor, the tape every in-place
# operation with the version that it left, so no saved-tensor hook is needed.

_MESSAGE = re.compile(
    r"modified by an inplace operation: \[[\w.]+ \[(?P<shape>[\d, ]*)\]\]"
    r"(?:, which is output \d+ of (?P<node>\w+),)? is at version (?P<now>\d+); expected version (?P<then>\d+)"
)


@dataclass(frozen=True, slots=True)
class FailedBackward:
    """Why a backward failed.

    ``line`` changed a tensor that it needs, or used a value whose graph was freed; ``saved`` made that value.
    """

    text: str
    line: SourceLine | None
    saved: SourceLine | None


def find_overwritten(message: str, operations: Sequence[Operation]) -> FailedBackward | None:
    """Find the write behind torch's error ``message``; None if it is another error."""
    matched = _MESSAGE.search(message)
    if matched is None:
        return None
    shape = tuple(int(n) for n in matched["shape"].replace(" ", "").split(",") if n)
    then, now = int(matched["then"]), int(matched["now"])
    last: dict[int, int] = {}
    for operation in operations:
        for number, version in operation.changed:
            last[number] = max(version, last.get(number, -1))
    writes = [
        (position, number)
        for position, operation in enumerate(operations)
        for number, version in operation.changed
        if version == then + 1 and last[number] >= now
    ]
    fitting = [w for w in writes if operations[w[0]].shape == shape]
    # A layer saves its weight transposed.
    fitting = fitting or [w for w in writes if sorted(operations[w[0]].shape) == sorted(shape)] or writes
    node = matched["node"] or ""
    named = [w for w in fitting if node.lower().startswith(operations[w[0]].name.strip("_").lower())]
    fitting = named or fitting
    # A tensor without a use before the write cannot have been saved before it.
    pairs = [(w, saved) for w in fitting if (saved := _saved_by(operations, *w)) is not None]
    if not pairs:
        text = (
            f"a tensor of shape {shape} that backward needs was changed in place; no operation that was "
            "recorded fits (it may be in another thread, or inside compiled code)"
        )
        return FailedBackward(text, None, None)
    (position, _), saved = pairs[0]
    write = operations[position]
    text = (
        f"a tensor of shape {shape} that backward needs was changed in place by {write.name} "
        f"after {saved.name} had used it at {saved.line}"
    )
    if len(pairs) > 1:
        text += f" ({len(pairs)} operations fit; this is the first)"
    if write.is_update:
        text += (
            ". The graph is older than that step: detach what is carried from one step to the next, or call "
            "backward of every loss before the optimizer's step"
        )
    return FailedBackward(text, write.line, saved.line)


def _saved_by(operations: Sequence[Operation], position: int, number: int) -> Operation | None:
    """Return the last operation before a write that may have saved the tensor."""
    for operation in reversed(operations[:position]):
        if operation.name.startswith("grad."):  # `.grad` is read or set
            continue
        if number in operation.inputs or (operation.carries and number in operation.outputs):
            return operation
    return None


_FREED = "Trying to backward through the graph a second time"


def find_freed(
    message: str,
    operations: Sequence[Operation],
    loss: Iterable[int],
    earlier: Iterable[int],
    parameters: Iterable[int],
) -> FailedBackward | None:
    """Find what led a backward from ``loss`` into the graph of ``earlier`` losses; None for another error.

    Losses and parameters, which losses may share, are given by their numbers on the tape.
    """
    if not message.startswith(_FREED):
        return None
    freed = _values_behind(operations, earlier) - set(parameters)
    path = _values_behind(operations, loss)
    made: dict[int, Operation] = {}
    for operation in operations:
        reused = [n for n in operation.inputs if n in freed and n in made]
        is_recorded = operation.carries and operation.enabled
        if is_recorded and path.intersection(operation.outputs) - freed and reused:
            value = made[reused[0]]
            text = (
                f"{operation.name} uses a value that {value.name} made at {value.line}, and an earlier "
                "backward has freed its graph. Detach what is carried from one step to the next; of losses "
                "that share a forward, call backward once on their sum"
            )
            return FailedBackward(text, operation.line, value.line)
        made.update((n, operation) for n in operation.outputs if is_recorded and n in path)
    if set(loss) & freed:
        text = "backward is called again on a loss whose graph an earlier backward has freed"
    else:
        text = "an earlier backward has freed a part of the graph; no operation that was recorded shows which"
    return FailedBackward(text, None, None)


def _values_behind(operations: Sequence[Operation], numbers: Iterable[int]) -> set[int]:
    """Return these tensors, those that a gradient would reach from them, and what was computed with these."""
    seen = set(numbers)
    for operation in reversed(operations):
        is_recorded = operation.carries and operation.enabled and not operation.cut
        if is_recorded and seen.intersection(operation.outputs):
            seen.update(operation.inputs, operation.outputs)
    return seen
