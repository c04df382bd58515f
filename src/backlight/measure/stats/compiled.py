"""The compiled tier: a fused ``torch.compile`` kernel per type of tensor, or the reason why there is none.

A list of 148 tensors as one kernel takes a minute to compile; a kernel with dynamic sizes, called per
tensor, takes seconds. A failure costs the compiled tier only: the caller falls back to the eager kernels,
which give the same numbers. R rows of W scalars; V pairs of bfloat16.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types with a kernel: those whose squares float64 always holds. The others are rare, and eager."""

COMPILE_WITH_IMPORT_S = 5.0
"""Seconds that a first compilation takes in a process (``bench/measure.py`` prints it)."""

COMPILE_S = 1.5
"""Seconds where the user's own ``torch.compile`` has loaded the compiler already."""

PARALLEL_SCALARS = 2**22
"""Scalars from which a tensor on the CPU is worth waking other threads: an idle one takes 0.1 ms."""

_MAX_KERNELS = 8  # where settings change at every step, compiling would never end
_EXAMPLE_SCALARS = 2**22
_SERIAL_ROWS = 4
_THREADED_ROWS = 16
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "compile_threads": 1,  # no pool of worker processes inside the training process
    "cpp.dynamic_threads": True,  # the user's thread count, as it is at each call
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add: a tenth faster on one thread
}

_SERIAL_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "cpp.threads": 1,
    "cpp.dynamic_threads": False,
}

_State = tuple[int, bool, torch.dtype]


class Kernel(NamedTuple):
    """A compiled function and the number of rows R that it wants a tensor to be cut into.

    ``run`` takes a contiguous matrix ``[R, W]`` and returns float64 ``[4, R]``: norm, largest magnitude, sum
    and number of non-zero values; on an accelerator ``[6, R]``, with the numbers of NaN and infinite values.
    A ``paired`` kernel takes bfloat16 viewed as int32, two in each.
    """

    run: Callable[[Tensor], Tensor]
    rows: int
    paired: bool = False


class NotCompiledError(RuntimeError):
    """The kernel ran as plain Python, which would cost a full-size float64 copy."""


class Kernels:
    """The compiled kernels of a process. ``reason`` is empty while nothing has failed; a failure is final."""

    def __init__(self) -> None:
        self.reason = ""
        self._kernels: dict[tuple[str, torch.dtype, int, _State], Kernel] = {}

    def get(self, device: torch.device, dtype: torch.dtype, *, threaded: bool = False) -> Kernel | None:
        """Return the kernel for such tensors, compiled on first use; None if there is none.

        On the CPU there is one for the calling thread alone and a ``threaded`` one.
        """
        if self.reason or not _undisturbed(device):
            return None
        # torch guards a compiled function by these settings and compiles again when one has changed;
        # with a kernel for each, no kernel is ever recompiled.
        state = (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
        )
        rows = 256
        if device.type == "cpu":
            rows = _THREADED_ROWS if threaded and state[0] > 1 else _SERIAL_ROWS
        key = (device.type, dtype, rows, state)
        if key not in self._kernels and len(self._kernels) >= _MAX_KERNELS:
            return None
        if key not in self._kernels:
            try:
                # The compiler may warn, which an error filter of the user would turn into a failure.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._kernels[key] = self._compile(device, dtype, rows)
            except Exception as error:  # noqa: BLE001 - compilers fail in every way; training must go on
                self.fail(error)
                return None
        return self._kernels[key]

    def fail(self, error: Exception) -> None:
        """Give up the compiled tier and keep the first lines of the reason."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        self.reason = f"{type(error).__name__}: {' '.join(lines[:2]) or 'no message'}"
        self._kernels.clear()

    def _compile(self, device: torch.device, dtype: torch.dtype, rows: int) -> Kernel:
        import torch._inductor  # noqa: PLC0415 - takes seconds; only the compiled tier pays

        function = _ON_CPU[dtype] if device.type == "cpu" else _rows_and_non_finite
        name = f"{function.__name__}_{device.type}_{str(dtype).removeprefix('torch.')}_{len(self._kernels)}"
        # torch keeps one cache, with limits and policies on recompiling, per code object: each kernel
        # gets its own, so that none counts as a recompilation of another.
        own = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
        known = set(torch._inductor.list_options())
        wanted = _OPTIONS | (_SERIAL_OPTIONS if rows == _SERIAL_ROWS else {})
        options = {option: value for option, value in wanted.items() if option in known}
        kernel = Kernel(
            torch.compile(own, dynamic=True, fullgraph=True, options=options),
            rows,
            function is _rows_of_pairs,
        )
        example = torch.empty(_EXAMPLE_SCALARS, dtype=dtype, device=device).view(rows, -1)
        kernel.run(example.view(torch.int32) if kernel.paired else example)
        return kernel


class CompileTrigger:
    """Ski-rental rule: compile once eager time equals the compile cost (2-competitive)."""

    def __init__(self) -> None:
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        """Count host time that a compiled kernel would have saved."""
        self._spent += seconds

    def is_due(self) -> bool:
        """Return whether compiling is the better choice from now on."""
        return self._spent >= (
            COMPILE_S if "torch._inductor.compile_fx" in sys.modules else COMPILE_WITH_IMPORT_S
        )


KERNELS = Kernels()
"""The kernels of this process."""

COMPILE_TRIGGER = CompileTrigger()
"""The eager work of this process, against the cost of compiling."""


def _undisturbed(device: torch.device) -> bool:
    """Return whether no user mode is active in which a kernel would be recompiled, or not compiled at all."""
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device.type):
        return False
    stacks = ("_len_torch_function_stack", "_len_torch_dispatch_stack")
    return not any(getattr(torch._C, stack, int)() for stack in stacks)


def _check_compiling() -> None:
    """Raise NotCompiledError if the kernel runs as plain Python."""
    if not torch.compiler.is_compiling():
        raise NotCompiledError("torch.compile is switched off here: disabled, or an eager stance")


def _rows(x_RW: Tensor) -> Tensor:
    """Return ``[4, R]``, see :class:`Kernel`."""
    _check_compiling()
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


def _rows_of_pairs(pair_RV: Tensor) -> Tensor:
    """Return ``[4, R]`` of bfloat16 values, two in each int32; see :class:`Kernel`.

    A bfloat16 is the upper half of a float32. Converted in pairs by shifts it takes the instructions of
    float32; converted by type, the compiler's vectors are four wide and spill, at seven times the cost.
    """
    _check_compiling()
    one_RV, other_RV = pair_RV & -65536, pair_RV << 16
    bits_RV, other_bits_RV = one_RV & 0x7FFFFFFF, other_RV & 0x7FFFFFFF
    x_RV = one_RV.view(torch.float32).to(torch.float64)
    y_RV = other_RV.view(torch.float32).to(torch.float64)
    nonzero_RV = bits_RV.clamp(max=1) + other_bits_RV.clamp(max=1)
    return torch.stack(
        (
            (x_RV * x_RV + y_RV * y_RV).sum(1).sqrt(),
            torch.maximum(bits_RV, other_bits_RV).amax(1).view(torch.float32).to(torch.float64),
            (x_RV + y_RV).sum(1),
            nonzero_RV.sum(1, dtype=torch.int32).to(torch.float64),
        )
    )


def _rows_by_value(x_RW: Tensor) -> Tensor:
    """Return ``[4, R]``, see :class:`Kernel`; for float16, whose bits compile to scalar code."""
    _check_compiling()
    x_RW = x_RW.to(torch.float32)
    wide_RW = x_RW.to(torch.float64)
    return torch.stack(
        (
            (wide_RW * wide_RW).sum(1).sqrt(),
            x_RW.abs().amax(1).to(torch.float64),
            wide_RW.sum(1),
            (x_RW != 0).sum(1, dtype=torch.int32).to(torch.float64),
        )
    )


def _rows_and_non_finite(x_RW: Tensor) -> Tensor:
    """Return ``[6, R]``, see :class:`Kernel`."""
    nan_R = torch.isnan(x_RW).sum(1, dtype=torch.int32).to(torch.float64)
    inf_R = torch.isinf(x_RW).sum(1, dtype=torch.int32).to(torch.float64)
    return torch.cat((_rows(x_RW), torch.stack((nan_R, inf_R))))


_ON_CPU = {torch.float32: _rows, torch.bfloat16: _rows_of_pairs, torch.float16: _rows_by_value}
