"""Why a parameter has no gradient: the reasons in words, and the choice among them.

Sources: docs/formulas.md, section 5. A reason that is not certain says so: wrong is worse than undetermined.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from backlight.capture.expected_parameters import RegistrationLines
    from backlight.diagnose.missing_gradients.flow import Flow, Use
    from backlight.diagnose.missing_gradients.tape import Operation
    from backlight.user_code import SourceLine


class Cause(enum.StrEnum):
    """What keeps a gradient from a parameter, or a parameter from being trained."""

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
    """Why one parameter gets no gradient.

    ``weight`` orders reasons of several steps: the one that knows most is kept.
    """

    cause: Cause
    text: str
    line: SourceLine | None = None
    weight: int = 0


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
        text += f"; optimizer {held_by} holds it all the same, which looks like an accident"
    return Reason(Cause.FROZEN, text, line, 9)


def not_held(
    parameter: Tensor,
    optimizers: list[Any],
    stale: dict[int, list[tuple[int, ...]]],
    registration_lines: RegistrationLines,
) -> Reason:
    """Return why a parameter that gets a gradient is not trained.

    Parameters
    ----------
    parameter, optimizers:
        The parameter, and the optimizers that are there.
    stale:
        Shapes of the tensors that no living model has, by number of the optimizer that holds them.
    births:
        Lines at which parameters and optimizers were made.
    """
    made = registration_lines.of_parameter(parameter)
    for number, shapes in stale.items():
        if tuple(parameter.shape) in shapes:
            since = registration_lines.of_optimizer(optimizers[number])
            text = (
                f"gets a gradient, but optimizer {number} holds another tensor of that shape which no "
                "living model has: this one was made after the optimizer"
            )
            return Reason(Cause.STALE, text + (f" ({since})" if since else ""), made, 9)
    return Reason(Cause.NOT_IN_OPTIMIZER, "gets a gradient, but no optimizer holds it", made, 8)


def before_backward(flow: Flow, use: Use, loss: set[int], *, module_ran: bool, elsewhere: bool) -> Reason:
    """Return why the graph of the loss does not reach a parameter.

    Parameters
    ----------
    flow, use:
        The tape and what became of the parameter on it.
    loss:
        Numbers of every tensor that the loss was computed from, gradient or not.
    module_ran:
        Whether the module that owns the parameter was called.
    elsewhere:
        Whether it may have run where the tape does not see it.
    """
    operations = flow.operations
    for position in use.cuts:
        if loss.intersection(operations[position].outputs):
            return _cut(flow, position, sure=True)
    for position in use.cuts:
        out = flow.leaves_torch(position)
        if out is not None:
            return _left(operations[position], out)
    for position in use.hidden:
        found = _hidden(flow, position)
        if found is not None:
            return found
    if not use.operations:
        if elsewhere:
            return Reason(
                Cause.UNDETERMINED,
                "its module ran where operations are not seen (another thread, TorchScript)",
            )
        if module_ran:
            return Reason(Cause.UNUSED, "unused: its module ran, but no operation took it", weight=2)
        return Reason(Cause.UNUSED, "unused: no operation of the forward pass took it", weight=1)
    last = operations[use.operations[-1]]
    text = f"its result is not in the loss: last used by {last.name}"
    if use.cuts:
        first = operations[use.cuts[0]]
        if first is not last:
            how = _CUTS.get(first.cut, first.cut)
            text += f"; {how} by {first.name} at {first.line}, which the loss does not use"
    return Reason(Cause.OUTSIDE_LOSS, text, last.line, 4)


def _cut(flow: Flow, position: int, *, sure: bool) -> Reason:
    operation = flow.operations[position]
    where = "on its way to the loss" if sure else "after its use"
    out = flow.leaves_torch(position)
    extra = f"; the value then leaves torch by {out.name}" if out is not None and out is not operation else ""
    return Reason(
        Cause.CUT,
        f"cut {where} by {_plain(operation.name)}: {_CUTS[operation.cut]}{extra}",
        operation.line,
        8,
    )


def _left(cut: Operation, out: Operation) -> Reason:
    how = "" if out is cut else f"{_plain(cut.name)} ({_CUTS[cut.cut]}), then "
    text = f"its value leaves torch: {how}taken out by {out.name}; what comes of it there has no gradient"
    return Reason(Cause.LEFT_TORCH, text, out.line, 6)


def _hidden(flow: Flow, position: int) -> Reason | None:
    region = flow.in_checkpoint(position)
    if region is not None:
        if region.enabled and not region.carries:
            return Reason(
                Cause.CUT,
                "used in a re-entrant checkpoint none of whose inputs requires a gradient: nothing inside "
                "is trained (use_reentrant=False does not need that)",
                region.line,
                8,
            )
        if not region.enabled:
            return Reason(
                Cause.CUT, f"cut: {_CUTS['no_grad']} around a re-entrant checkpoint", region.line, 7
            )
        return None
    function = flow.outermost(position)
    return Reason(
        Cause.CUT,
        f"cut: used inside {function.name}.forward without being an argument of apply",
        function.line,
        7,
    )


def pending_checkpoint(flow: Flow, use: Use) -> bool:
    """Whether the parameter is used in a re-entrant checkpoint, which only recomputation can judge."""
    return any(
        (region := flow.in_checkpoint(p)) is not None and region.enabled and region.carries
        for p in use.hidden
    )


def none_returned(function: str, applied: SourceLine | None, defined: SourceLine | None) -> Reason:
    """Return the reason for a custom function that gave None."""
    where = f" (backward at {defined})" if defined is not None else ""
    return Reason(
        Cause.NONE_RETURNED, f"reached, but {function}.backward returned None for it{where}", applied, 9
    )


def _plain(name: str) -> str:
    return {"data.get": ".data", "data.set": ".data =", "__setitem__": "an assignment to a slice"}.get(
        name, name
    )
