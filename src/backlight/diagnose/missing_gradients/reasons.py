"""Reasons why a parameter has no gradient, and the answer that collects them.

A reason that is not certain says so: a wrong one is worse than undetermined.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backlight.capture.parameters import plain_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from backlight.capture.parameters import RegistrationLines
    from backlight.diagnose.missing_gradients.flow import FailedBackward, Flow, Use
    from backlight.diagnose.missing_gradients.tape import GradRead, NoneReturned, Operation
    from backlight.user_code import SourceLine


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
