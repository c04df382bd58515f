"""The compiled tier: one fused kernel of ``torch.compile`` per device type and dtype, or the reason why not.

A list of 148 tensors as one kernel takes a minute to compile; a kernel with one dynamic size, called
per tensor, takes seconds. Whatever goes wrong here costs the compiled tier only: the caller falls back
to the eager kernels, which give the same numbers.

R rows, W scalars in each.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types with a kernel: those whose squares float64 always holds. The others are rare, and eager."""

WORTHWHILE = 2**15
"""Scalars below which a call of the kernel costs more than eager arithmetic beside other small tensors."""

PRICE_WITH_IMPORT = 5.0
"""Seconds that a first compilation takes in a process (see `bench/statistics.py`)."""

PRICE = 1.5
"""Seconds where the user's own ``torch.compile`` has loaded the compiler already."""

_EXAMPLE = 2**22
_OPTIONS: dict[str, str | int | bool] = {
    "compile_threads": 1,  # no pool of worker processes inside somebody's training
    "cpp.dynamic_threads": True,  # the user's thread count, as it is at each call
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add: a tenth faster on one thread
}


class NotCompiledError(RuntimeError):
    """The function ran as plain Python, where a full-size float64 copy would be the price."""


def _rows(x_RW: Tensor) -> Tensor:
    """Return ``[4, R]``: norm, largest magnitude, sum and number of non-zero values.

    Raises
    ------
    NotCompiledError
        If it is not being compiled.
    """
    if not torch.compiler.is_compiling():
        raise NotCompiledError("torch.compile is switched off here (disabled, or an eager stance)")
    x_RW = x_RW.to(torch.float32)
    wide_RW = x_RW.to(torch.float64)
    # Without its sign bit a float is ordered as its bits are, infinity above all numbers and NaN above
    # infinity: integer maxima keep NaN for free, and min(bits, 1) is 0 for zeros alone.
    bits_RW = x_RW.abs().view(torch.int32)
    return torch.stack(
        (
            (wide_RW * wide_RW).sum(1).sqrt(),
            bits_RW.amax(1).view(torch.float32).to(torch.float64),
            wide_RW.sum(1),
            bits_RW.clamp(max=1).sum(1, dtype=torch.int32).to(torch.float64),
        )
    )


def _rows_and_non_finite(x_RW: Tensor) -> Tensor:
    """Return ``[6, R]``: the same, then the numbers of NaN and infinite values."""
    four_4R = _rows(x_RW)
    nan_R = torch.isnan(x_RW).sum(1, dtype=torch.int32).to(torch.float64)
    inf_R = torch.isinf(x_RW).sum(1, dtype=torch.int32).to(torch.float64)
    return torch.cat((four_4R, torch.stack((nan_R, inf_R))))


@dataclass
class Kernels:
    """Compiled kernels by device type and dtype, and why there is none.

    ``reason`` is empty while nothing has failed. A failure is final for the process: what failed once
    inside somebody's training is not tried again.
    """

    reason: str = ""
    _made: dict[tuple[str, torch.dtype], Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def rows(self, device: torch.device) -> int:
        """Return the number of rows that tensors on ``device`` are cut into."""
        return 16 if device.type == "cpu" else 256

    def call(self, x_RW: Tensor) -> Tensor | None:
        """Run the kernel on a contiguous matrix; None where there is no kernel.

        Returns
        -------
        Tensor or None
            float64 ``[4, R]``: norm, largest magnitude, sum and number of non-zero values; on an
            accelerator ``[6, R]``, with the numbers of NaN and infinite values.
        """
        if self.reason:
            return None
        try:
            kernel = self._made.get((x_RW.device.type, x_RW.dtype))
            if kernel is None:
                kernel = self._made[x_RW.device.type, x_RW.dtype] = _compile(x_RW)
            return kernel(x_RW)
        except Exception as error:  # noqa: BLE001 - compilers fail in every way; training must go on
            first = str(error).strip().splitlines()[:1]
            self.reason = f"{type(error).__name__}: {first[0] if first else 'no message'}"
            self._made.clear()
            return None


KERNELS = Kernels()
"""The kernels of this process."""


class Patience:
    """Decides when compiling pays: once eager work has cost what compiling would.

    Whoever rents until the rent has reached the price never pays more than twice what was best.
    """

    def __init__(self) -> None:
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        """Count host time that a compiled kernel would have saved."""
        self._spent += seconds

    def exhausted(self) -> bool:
        """Tell whether compiling is the better choice from here on."""
        return self._spent >= (PRICE if "torch._inductor.compile_fx" in sys.modules else PRICE_WITH_IMPORT)


def _compile(x_RW: Tensor) -> Callable[[Tensor], Tensor]:
    function = _rows if x_RW.device.type == "cpu" else _rows_and_non_finite
    name = f"{function.__name__}_{x_RW.device.type}_{str(x_RW.dtype).removeprefix('torch.')}"
    # torch.compile keeps one cache, with a limit and a policy on recompiling, per code object: each
    # kernel gets its own, so that none counts as a recompilation of another.
    own = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    options: dict[str, Any] = {k: v for k, v in _OPTIONS.items() if k in _known_options()}
    kernel: Callable[[Tensor], Tensor] = torch.compile(own, fullgraph=True, options=options)
    example_RW = torch.empty(_EXAMPLE, dtype=x_RW.dtype, device=x_RW.device).view(x_RW.shape[0], -1)
    torch._dynamo.mark_dynamic(example_RW, 1)
    kernel(example_RW)
    return kernel


def _known_options() -> set[str]:
    import torch._inductor  # noqa: PLC0415 - seconds, which only the compiled tier shall pay

    return set(torch._inductor.list_options())
