"""Tensors that were meant as parameters but are computed, so that backward leaves no ``.grad`` in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from backlight.capture.expected_parameters import plain_tensors
from backlight.diagnose.missing_gradients.parameter_rows import Row
from backlight.diagnose.missing_gradients.reasons import Cause, Reason

if TYPE_CHECKING:
    from torch import Tensor, nn

    from backlight.diagnose.missing_gradients.flow import Flow
    from backlight.diagnose.missing_gradients.tape import GradRead


def nonleaf_parameters(
    flow: Flow, roots: list[tuple[str, nn.Module]], number: Callable[[Tensor], int]
) -> list[Row]:
    """Return the tensors that a module computed when it was built and holds as plain attributes.

    What a forward pass leaves in an attribute is a result, not a would-be parameter.
    """
    rows = []
    for name, tensor in plain_tensors(roots):
        producer = flow.producer(number(tensor))
        if producer is not None and not producer.module:
            text = f"not a leaf: computed by {producer.name}, so it is no parameter and gets no .grad"
            reason = Reason(Cause.NON_LEAF, text, producer.line, 5)
            rows.append(
                Row(name, tuple(tensor.shape), None, -1, held=True, reason=reason, when="before backward")
            )
    return rows


def nonleaf_grad_reads(asked: Iterable[GradRead]) -> list[Row]:
    """Return the computed tensors whose ``.grad`` the script reads, once for each line that reads."""
    rows: dict[str, Row] = {}
    for question in asked:
        name = f"a tensor made by {question.producer.name}" if question.producer is not None else "a tensor"
        made = question.producer.line if question.producer is not None else None
        text = f"not a leaf: it is computed, so backward leaves nothing in its .grad, read at {question.line}"
        reason = Reason(Cause.NON_LEAF, text, made or question.line, 5)
        row = Row(name, question.shape, None, -1, held=True, reason=reason, when="after backward")
        rows.setdefault(str(question.line), row)
    return list(rows.values())
