"""Custom autograd functions: where they are applied, and for which inputs their backward gave None."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.operations import tensors_in
from backlight.diagnose.node_origin import Origin, next_number
from backlight.user_code import SourceLine, definition, user_line

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.diagnose.missing_gradients.tape import Tape


@dataclass(frozen=True, slots=True)
class NoneReturned:
    """A custom function whose backward returned None for an input that wanted a gradient.

    ``sequence`` and ``edge`` find the input in a walked graph: the node and the index of its edge.
    """

    function: str
    sequence: int
    edge: int
    applied: SourceLine | None
    defined: SourceLine | None


def install(patches: Patches, tape: Tape, on_none: Callable[[NoneReturned], None]) -> None:
    """Follow every ``Function.apply`` on ``tape``; report each None to ``on_none``."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original.__func__)
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if tape.paused or tape.full:
                return original.__func__(cls, *args, **kwargs)
            inputs = tensors_in(args)
            carrying = [t.requires_grad for t in inputs]
            line = user_line()
            begin = next_number()
            at = tape.enter_function(cls.__name__, line)
            outputs: list[torch.Tensor] = []
            try:
                result = original.__func__(cls, *args, **kwargs)
                outputs = tensors_in(result)
            finally:
                tape.leave_function(at, inputs, carrying, outputs)
            # The node takes its number before its forward runs.
            tape.origins.add(begin, begin + 1, Origin(cls.__name__, line))
            _listen(cls, args, outputs, line, on_none)
            return result

        return classmethod(apply)

    patches.replace(torch.autograd.Function, "apply", wrap)


def _listen(
    cls: Any,
    args: tuple[Any, ...],
    outputs: list[torch.Tensor],
    line: SourceLine | None,
    on_none: Callable[[NoneReturned], None],
) -> None:
    # Only the tensors that are arguments themselves are edges of the node.
    wanting = [t.requires_grad for t in args if isinstance(t, torch.Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    if not any(wanting) or not differentiable:
        return
    node = differentiable[0].grad_fn
    if node is None or not hasattr(node, "needs_input_grad"):
        return
    defined = definition(cls.__dict__.get("backward") or getattr(cls, "backward", None))
    static = cls.__dict__.get("backward")
    if isinstance(static, staticmethod):
        defined = definition(static.__func__)
    sequence = node._sequence_nr()
    name = cls.__name__

    def after(grads: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        if all(g is None for g in given):
            return
        for edge, (grad, wants) in enumerate(zip(grads, wanting, strict=False)):
            if wants and grad is None:
                on_none(NoneReturned(name, sequence, edge, line, defined))

    node.register_hook(after)
