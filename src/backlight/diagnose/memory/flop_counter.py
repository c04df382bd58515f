"""Floating-point operations and logits, seen by the recorder as the operations of a step pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from backlight.diagnose.memory.prediction_result import Flops
from backlight.records import Phase

aten = torch.ops.aten


class Counter:
    """Counts what a step computes; given to :class:`~backlight.diagnose.memory.recorder.Recorder`.

    Attributes
    ----------
    softmax:
        Told of what each log-softmax reads, while that is there.
    """

    def __init__(self) -> None:
        self._phases: dict[str, int] = {}
        self._modules: dict[str, int] = {}
        self._recomputed = 0
        self.softmax: Callable[[torch.Tensor], None] | None = None

    def clear(self) -> None:
        """Begin anew, with the next step."""
        self._phases.clear()
        self._modules.clear()
        self._recomputed = 0

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, phase: str, modules: Any
    ) -> None:
        """Count one operation, which ran in ``phase`` of a step."""
        packet = func._overloadpacket
        if packet is aten._log_softmax and self.softmax is not None:
            self.softmax(args[0])
        formula = _FORMULAS.get(packet)
        if formula is None:
            return
        count = int(formula(*args, **kwargs, out_val=result))
        self._phases[phase] = self._phases.get(phase, 0) + count
        if phase == Phase.BACKWARD:
            self._recomputed += count if modules.inside else 0
            return
        name = modules.current(backward=False)
        while True:
            self._modules[name] = self._modules.get(name, 0) + count
            if not name:
                return
            name = name.rpartition(".")[0]

    def flops(self) -> Flops:
        """Return what was counted since the last :meth:`clear`."""
        backward = self._phases.get(Phase.BACKWARD, 0)
        forward = self._phases.get(Phase.FORWARD, 0) + self._phases.get(Phase.LOSS, 0)
        return Flops(forward, backward, self._recomputed, dict(self._modules))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-any-return, no-untyped-call]  # torch's are untyped


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)  # type: ignore[no-any-return, no-untyped-call]  # torch's are untyped


# torch counts the attention of the CPU as 0. As everywhere, a causal mask is not taken off.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
