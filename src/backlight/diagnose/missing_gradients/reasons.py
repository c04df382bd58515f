"""Reasons why a parameter has no gradient: queries on a tape, and the answer that collects them."""

from __future__ import annotations

import enum
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backlight.capture.forked_child import ChildError, in_child
from backlight.capture.parameters import plain_tensors
from backlight.diagnose.missing_gradients.tape import Operation
from backlight.user_code import SourceLine

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from backlight.capture.parameters import RegistrationLines
    from backlight.diagnose.missing_gradients.tape import GradRead, NoneReturned


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


# Reasons why a parameter has no gradient, and the answer that collects them.
#
# A reason that is not certain says so: a wrong one is worse than undetermined.


class MissingCause(enum.StrEnum):
    """Why a parameter has no gradient, or is not trained."""

    FROZEN = "frozen"
    UNUSED = "unused"
    CUT = "cut"
    LEFT_TORCH = "left torch"
    OUTSIDE_LOSS = "not in the loss"
    NONE_RETURNED = "None returned"
    NOT_IN_OPTIMIZER = "not in an optimizer"
    STALE = "optimizer holds another"
    NON_LEAF = "not a leaf"
    UNDETERMINED = "undetermined"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one parameter gets no gradient."""

    cause: MissingCause
    text: str
    line: SourceLine | None = None
    weight: int = 0  # of the reasons of several steps the heaviest is kept


@dataclass
class ParameterState:
    """State of one parameter; ``when`` is the moment at which its reason was found."""

    name: str
    shape: tuple[int, ...]
    reference: weakref.ref[Any] | None
    root: int = 0
    aliases: tuple[str, ...] = ()
    arrived: bool = False
    reached: bool = False
    in_optimizer: bool = False
    reason: Reason | None = None
    when: str = ""

    def keep(self, reason: Reason, when: str) -> None:
        """Keep ``reason`` unless a heavier one is known."""
        if self.reason is None or reason.weight > self.reason.weight:
            self.reason, self.when = reason, when


@dataclass
class MissingGradients:
    """The answer: parameters without a gradient or without an optimizer, and an in-place error."""

    rows: list[ParameterState] = field(default_factory=list)
    watched: int = 0
    steps: int = 0
    backwards: int = 0
    nodes: int = 0
    failure: FailedBackward | None = None
    notes: list[str] = field(default_factory=list)


_CUTS = {
    "detach": "detached",
    "data": "read through .data, which does not record",
    "no_grad": "computed without recording (torch.no_grad or inference mode)",
    "integer": "turned into integers, which carry no gradient",
    "not_differentiable": "passed through an operation that gives no gradient",
    "function": "passed through a custom function whose output carries no gradient",
    "numpy": "taken out of torch",
}


def frozen(line: SourceLine | None, held_by: int | None) -> Reason:
    """Return the reason for ``requires_grad=False``; ``held_by`` is an optimizer that holds it anyway."""
    text = "frozen: requires_grad is False"
    if line is not None:
        text += ", set here"
    if held_by is not None:
        text += f"; optimizer {held_by} holds it nevertheless, which looks like a mistake"
    return Reason(MissingCause.FROZEN, text, line, 9)


def not_held(
    parameter: Tensor,
    optimizers: list[Any],
    stale: dict[int, list[tuple[int, ...]]],
    registration_lines: RegistrationLines,
) -> Reason:
    """Return why a parameter with a gradient is not trained.

    ``stale`` holds shapes of tensors that no living model has, by number of the optimizer that holds them.
    """
    made = registration_lines.of_parameter(parameter)
    for number, shapes in stale.items():
        if tuple(parameter.shape) in shapes:
            since = registration_lines.of_optimizer(optimizers[number])
            text = (
                f"gets a gradient, but optimizer {number} holds another tensor of that shape which no "
                "living model has: this one was created after the optimizer"
            )
            return Reason(MissingCause.STALE, text + (f" ({since})" if since else ""), made, 9)
    return Reason(MissingCause.NOT_IN_OPTIMIZER, "gets a gradient, but no optimizer holds it", made, 8)


def before_backward(flow: Flow, use: Use, loss: set[int], *, module_ran: bool, unrecorded: bool) -> Reason:
    """Return why the graph of the loss does not reach a parameter with this use.

    ``loss`` holds every tensor that the loss was computed from, gradient or not; ``module_ran``: its module
    was called; ``unrecorded``: that may have run where operations are not recorded.
    """
    operations = flow.operations
    hidden = [_hidden(flow, position) for position in use.hidden]
    for reason in hidden:
        if reason.cause is MissingCause.UNDETERMINED:
            return reason
    for position in use.cuts:
        if loss.intersection(operations[position].outputs):
            return _cut(flow, position)
    for position in use.cuts:
        out = flow.leaves_torch(position)
        if out is not None:
            return _left(operations[position], out)
    if hidden:
        return hidden[0]
    if not use.operations:
        if unrecorded:
            text = "its module ran where operations are not recorded (another thread, TorchScript)"
            return Reason(MissingCause.UNDETERMINED, text)
        if module_ran:
            return Reason(MissingCause.UNUSED, "unused: its module ran, but no operation used it", weight=2)
        return Reason(MissingCause.UNUSED, "unused: no operation of the forward pass used it", weight=1)
    last = operations[use.operations[-1]]
    text = f"its result is not in the loss: last used by {last.name}"
    if use.cuts:
        first = operations[use.cuts[0]]
        if first is not last:
            how = _CUTS.get(first.cut, first.cut)
            text += f"; {how} by {first.name} at {first.line}, which the loss does not use"
    return Reason(MissingCause.OUTSIDE_LOSS, text, last.line, 4)


def _cut(flow: Flow, position: int) -> Reason:
    operation = flow.operations[position]
    out = flow.leaves_torch(position)
    text = f"cut on its way to the loss by {_plain(operation.name)}: {_CUTS[operation.cut]}"
    if out is not None and out is not operation:
        text += f"; the value then leaves torch by {out.name}"
    return Reason(MissingCause.CUT, text, operation.line, 8)


def _left(cut: Operation, out: Operation) -> Reason:
    how = "" if out is cut else f"{_plain(cut.name)} ({_CUTS[cut.cut]}), then "
    text = f"its value leaves torch: {how}taken out by {out.name}; "
    text += "what is computed from it there has no gradient"
    return Reason(MissingCause.LEFT_TORCH, text, out.line, 6)


def _hidden(flow: Flow, position: int) -> Reason:
    region = flow.in_checkpoint(position)
    if region is None:
        function = flow.outermost(position)
        text = f"cut: used inside {function.name}.forward without being an argument of apply"
        return Reason(MissingCause.CUT, text, function.line, 7)
    if not region.enabled:
        text = f"cut: {_CUTS['no_grad']} around a re-entrant checkpoint"
        return Reason(MissingCause.CUT, text, region.line, 7)
    if region.carries:
        # What is inside is known after recomputation; a later step that records less must not call it unused.
        text = "inside a re-entrant checkpoint: known after recomputation"
        return Reason(MissingCause.UNDETERMINED, text, weight=3)
    text = (
        "used in a re-entrant checkpoint none of whose inputs requires a gradient: nothing inside is trained "
    )
    return Reason(MissingCause.CUT, f"{text}(use_reentrant=False does not need that)", region.line, 8)


def none_returned(none: NoneReturned) -> Reason:
    """Return the reason for a custom function that returned None."""
    where = f" (backward at {none.defined})" if none.defined is not None else ""
    text = f"reached, but {none.function}.backward returned None for it{where}"
    return Reason(MissingCause.NONE_RETURNED, text, none.applied, 9)


def _plain(name: str) -> str:
    return {"data.get": ".data", "data.set": ".data =", "__setitem__": "an assignment to a slice"}.get(
        name, name
    )


def nonleaf_parameters(
    flow: Flow, roots: list[tuple[str, nn.Module]], number: Callable[[Tensor], int]
) -> list[ParameterState]:
    """Return tensors that a module computed at construction and holds as plain attributes."""
    rows = []
    for name, tensor in plain_tensors(roots):
        producer = flow.producer(number(tensor))
        # What a forward pass leaves in an attribute is a result.
        if producer is not None and not producer.module:
            text = f"not a leaf: computed by {producer.name}, so it is no parameter and gets no .grad"
            reason = Reason(MissingCause.NON_LEAF, text, producer.line, 5)
            rows.append(
                ParameterState(
                    name,
                    tuple(tensor.shape),
                    None,
                    -1,
                    in_optimizer=True,
                    reason=reason,
                    when="before backward",
                )
            )
    return rows


def nonleaf_grad_reads(reads: Iterable[GradRead]) -> list[ParameterState]:
    """Return computed tensors whose ``.grad`` the script reads, once for each line."""
    rows: dict[str, ParameterState] = {}
    for read in reads:
        name = f"a tensor computed by {read.producer.name}" if read.producer is not None else "a tensor"
        made = read.producer.line if read.producer is not None else None
        text = f"not a leaf: it is computed, so backward leaves nothing in its .grad, read at {read.line}"
        reason = Reason(MissingCause.NON_LEAF, text, made or read.line, 5)
        row = ParameterState(
            name, read.shape, None, -1, in_optimizer=True, reason=reason, when="after backward"
        )
        rows.setdefault(str(read.line), row)
    return list(rows.values())
