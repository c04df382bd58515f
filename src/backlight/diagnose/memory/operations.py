"""What the recorded operations of a step compute: floating-point operations, workspaces, logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from backlight.diagnose.memory.result import Flops, LogitsMemory
from backlight.records import Phase

if TYPE_CHECKING:
    from backlight.diagnose.memory.recorder import MemoryRecorder, NodeModules

aten = torch.ops.aten

_WORKSPACE_OPERATIONS = frozenset({
    "convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn",
    "miopen_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
    "mm", "bmm", "addmm", "baddbmm", "_scaled_mm",
})  # fmt: skip
"""Operations whose kernels (oneDNN, cuDNN, cuBLAS) may allocate a workspace."""

_TOO_LOW = {
    "rnn": "recurrent layers: 4 to 52 % too low for a CPU, whose kernel returns a workspace as well",
    "convolution": "convolutions: on a CPU 2 to 50 % of a small model's peak on top, most in bf16",
}
"""What predictions missed in bench/memory.py, by a part of the names of the operations."""


def underestimates(workspaces: Mapping[str, int]) -> tuple[str, ...]:
    """Return by how much predictions with these operations were too low; nothing where they agreed."""
    return tuple(text for part, text in _TOO_LOW.items() if any(part in name for name in workspaces))


class OperationCounter:
    """Counts what a step computes, and calls ``on_softmax`` with the input of each log-softmax."""

    def __init__(self) -> None:
        self._by_phase: Counter[str] = Counter()
        self._by_module: Counter[str] = Counter()
        self._workspaces: Counter[str] = Counter()
        self._recomputed = 0
        self.on_softmax: Callable[[torch.Tensor], None] | None = None

    def clear(self) -> None:
        """Count the next step."""
        self._by_phase.clear()
        self._by_module.clear()
        self._workspaces.clear()
        self._recomputed = 0

    def __call__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        phase: str,
        modules: NodeModules,
    ) -> None:
        """Count one operation of a phase."""
        packet = func._overloadpacket
        if packet is aten._log_softmax and self.on_softmax is not None:
            self.on_softmax(args[0])
        if packet.__name__ in _WORKSPACE_OPERATIONS:
            self._workspaces[packet.__name__] += 1
        formula = _FORMULAS.get(packet)
        if formula is None:
            return
        count = int(formula(*args, **kwargs, out_val=result))
        self._by_phase[phase] += count
        if phase == Phase.BACKWARD:
            self._recomputed += count if modules.inside else 0
            return
        name = modules.current(backward=False)
        while True:
            self._by_module[name] += count
            if not name:
                return
            name = name.rpartition(".")[0]

    def flops(self) -> Flops:
        """Return what was counted since the last :meth:`clear`."""
        return Flops(
            forward=self._by_phase[Phase.FORWARD] + self._by_phase[Phase.LOSS],
            backward=self._by_phase[Phase.BACKWARD],
            recomputed=self._recomputed,
            modules=dict(self._by_module),
        )

    def workspaces(self) -> dict[str, int]:
        """Return the calls of operations whose kernels may allocate a workspace, by operation."""
        return dict(self._workspaces.most_common())


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-any-return, no-untyped-call]  # torch's are untyped


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)  # type: ignore[no-any-return, no-untyped-call]  # torch's are untyped


# torch counts the attention of the CPU as 0. As everywhere, a causal mask is not subtracted.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class LogitsTracker:
    """Finds the largest tensor that a log-softmax reads while a recorder is active."""

    def __init__(self, recorder: MemoryRecorder) -> None:
        self._recorder = recorder
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.float32
        self._index: int | None = None

    def on_softmax(self, tensor: torch.Tensor) -> None:
        """Keep the input of a log-softmax if it is the largest."""
        if not self._shape or tensor.numel() >= math.prod(self._shape):
            self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
            self._index = self._recorder.index(tensor)

    def find(self, start: int = 0, granule: int = 1) -> LogitsMemory | None:
        """Return the logits of the steps from event ``start`` on; None without a log-softmax."""
        if not self._shape:
            return None
        log = self._recorder.log
        elements = math.prod(self._shape)
        module = log.storages[self._index].module if self._index is not None else ""
        # Allocated by the same module, or outside of all modules once the forward is over.
        same_size = {
            index
            for index, storage in enumerate(log.storages)
            if math.prod(storage.shape) == elements
            and (storage.module == module or not storage.module)
            and storage.phase in {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
        }
        live = most = count = copies = 0
        for event in log.events[start:]:
            index = abs(event) - 1
            if index in same_size:
                size = -(-log.storages[index].nbytes // granule) * granule
                live, count = (live + size, count + 1) if event > 0 else (live - size, count - 1)
                most, copies = max(most, live), max(copies, count - 1)
        return LogitsMemory(
            shape=self._shape,
            dtype=str(self._dtype).removeprefix("torch."),
            itemsize=self._dtype.itemsize,
            copies=copies,
            live_at_most=most,
        )
