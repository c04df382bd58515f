"""Kernels, a matrix in and numbers per row out: eager ones, and fused ones by ``torch.compile``.

R rows of W scalars, N rows in all; V pairs of bfloat16. Rows may be padded with zeros, which change no number
here: non-zero values are counted, not zeros. The kernels never read a value on the host; the functions on
numpy arrays, which join numbers of rows to those of tensors, run there.

A list of 148 tensors as one kernel takes a minute to compile; a kernel with dynamic sizes, called per tensor,
takes seconds. A failure costs the compiled tier only: the caller falls back to the eager kernels, which give
the same numbers.
"""

from __future__ import annotations

import math
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_COUNTED = 2**22  # scalars whose booleans are in memory at once


def promoted(tensor: Tensor) -> Tensor:
    """Return 16-bit floating values as float32, in which products can be summed; else the tensor."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor


class Partials(NamedTuple):
    """Numbers per row, each ``[R]``; those of complex rows are of the magnitudes.

    ``total`` is the sum of the values, of complex ones the sum of the real parts.
    """

    norm: Tensor
    max_abs: Tensor
    total: Tensor
    nonzero: Tensor


class Scratch(threading.local):
    """Buffers on the host that every pass of a thread reuses.

    Fresh memory costs a page fault per 4 KiB, more than the arithmetic on it. On an accelerator torch caches
    memory.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of that shape, valid until the same use asks again in this thread."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        key = (use, dtype)
        view = self._views.get(key)
        if view is None or view.shape != shape or view.is_inference() != torch.is_inference_mode_enabled():
            view = self._view(key, shape, device)
        return view

    def _view(self, key: tuple[str, torch.dtype], shape: tuple[int, ...], device: torch.device) -> Tensor:
        size = math.prod(shape)
        held = self._held.get(key)
        if held is None or held.numel() < size or held.is_inference() != torch.is_inference_mode_enabled():
            held = torch.empty(size, dtype=key[1], device=device)
        view = held[:size].view(shape)
        if type(held) is Tensor:  # a mode of the user may return another type
            self._held[key], self._views[key] = held, view
        return view

    def drop(self) -> None:
        """Free the buffers of this thread."""
        self._held.clear()
        self._views.clear()


SCRATCH = Scratch()
"""The buffers of this process: a few MiB for each thread that measures."""


def narrow(x_RW: Tensor) -> Partials:
    """Measure rows of float32 or less: the square of such a value always fits float64."""
    shape, device = x_RW.shape, x_RW.device
    wide_RW = SCRATCH.take("wide", shape, torch.float64, device).copy_(x_RW)
    norm_R = torch.linalg.vector_norm(wide_RW, dim=1)
    total_R = wide_RW.sum(1)
    abs_RW = SCRATCH.take("abs", shape, torch.float32, device)
    if x_RW.dtype is torch.float32:
        torch.abs(x_RW, out=abs_RW)
    else:
        abs_RW.copy_(x_RW).abs_()
    max_R = abs_RW.amax(1)
    # A comparison within floats is vectorised, one into booleans is not: a third of the time.
    nonzero_R = abs_RW.ne_(0).sum(1)
    return Partials(norm_R, max_R, total_R, nonzero_R)


def wide(x_RW: Tensor, accumulator: torch.dtype = torch.float64) -> Partials:
    """Measure rows whose squares the accumulator may not hold: float64, complex, or a device without float64.

    Each row is multiplied by a power of two that brings its largest value near 1, so that no square that
    matters is lost at either end.
    """
    parts_RWC = _parts(x_RW).to(accumulator)
    scaled_RWC, down_R = _near_one(parts_RWC)
    norm_R = torch.linalg.vector_norm(scaled_RWC, dim=(1, 2)) / down_R
    if x_RW.is_complex():
        max_R = scaled_RWC.square().sum(-1).amax(1).sqrt() / down_R
    else:
        max_R = parts_RWC.abs().amax((1, 2))
    total_R = scaled_RWC[..., 0].sum(1) / down_R
    nonzero_R = (parts_RWC != 0).any(-1).sum(1).to(accumulator)
    return Partials(norm_R, max_R, total_R, nonzero_R)


def row_norms(x_RW: Tensor) -> Tensor:
    """Return the L2 norm of each row ``[R]`` of values in their widest type, at any magnitude."""
    scaled_RWC, down_R = _near_one(_parts(x_RW))
    norm_R: Tensor = torch.linalg.vector_norm(scaled_RWC, dim=(1, 2)) / down_R
    return norm_R


def non_finite(x_RW: Tensor) -> tuple[Tensor, Tensor]:
    """Count NaN and infinite values per row; a complex value is NaN or infinite if either part is."""
    rows, width = x_RW.shape
    nan_R = torch.zeros(rows, dtype=torch.int64, device=x_RW.device)
    inf_R = torch.zeros_like(nan_R)
    for x_RV in torch.split(x_RW, max(1, min(width, _COUNTED // rows)), 1):
        part_RV = x_RV.to(torch.float32) if x_RV.dtype.itemsize == 1 else x_RV
        nan_R += torch.isnan(part_RV).sum(1)
        inf_R += torch.isinf(part_RV).sum(1)
    return nan_R, inf_R


def _parts(x_RW: Tensor) -> Tensor:
    """Return real values ``[R, W, 1]``, or real and imaginary parts ``[R, W, 2]``."""
    return torch.view_as_real(x_RW.resolve_conj()) if x_RW.is_complex() else x_RW.unsqueeze(-1)


def _near_one(parts_RWC: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows multiplied by powers of two that bring their largest value near 1, and those powers."""
    down_R = _reciprocal_power_of_two(parts_RWC.abs().amax((1, 2)))
    return parts_RWC * down_R[:, None, None], down_R


def _reciprocal_power_of_two(top_R: Tensor) -> Tensor:
    """Return 2^-e with 2^(e-1) <= top < 2^e, kept within normal numbers; 1 for infinity and NaN."""
    exponent_R = torch.frexp(torch.nan_to_num(top_R, nan=1.0, posinf=1.0)).exponent
    # The power is put together from its bits: torch.ldexp overflows on the way for subnormal values.
    if top_R.dtype is torch.float64:
        bits_R = (1023 - exponent_R.to(torch.int64).clamp(-1000, 1000)) << 52
    else:
        bits_R = (127 - exponent_R.to(torch.int32).clamp(-120, 120)) << 23
    return bits_R.view(top_R.dtype)


Float64 = NDArray[np.float64]


def root_sum_squares(values: ArrayLike, axis: int | None = None) -> Float64:
    """Return the root of the sum of squares of ``values`` along ``axis`` (all of them by default).

    Values are divided by a power of two near the largest one, so neither 1e300 nor 1e-300 is lost. NaN stays
    NaN, also next to an infinity; the result for no values is 0.
    """
    array = np.abs(np.asarray(values, dtype=np.float64))
    top = np.max(array, axis=axis, keepdims=True, initial=0.0)
    exponent = _exponent(top)
    with np.errstate(over="ignore"):
        squares = np.square(np.ldexp(array, -exponent))
        root = np.ldexp(np.sqrt(np.sum(squares, axis=axis, keepdims=True)), exponent)
    result = np.where(np.isfinite(top), root, top)
    return np.asarray(np.squeeze(result, axis=axis), dtype=np.float64)


def root_sum_squares_by(owner: NDArray[np.int64], values: Float64, owners: int) -> Float64:
    """Return ``[owners]``: the root of the sum of squares of each owner's values, 0 for no values."""
    array = np.abs(values)
    top = max_by(owner, array, owners)
    exponent = _exponent(top)
    with np.errstate(over="ignore"):
        squares = np.square(np.ldexp(array, -exponent[owner]))
        root = np.ldexp(np.sqrt(np.bincount(owner, squares, owners)), exponent)
    return np.where(np.isfinite(top), root, top)


def max_by(owner: NDArray[np.int64], values: Float64, owners: int) -> Float64:
    """Return ``[owners]``: the largest of each owner's non-negative values; NaN wins, 0 for no values."""
    top = np.zeros(owners)
    with np.errstate(invalid="ignore"):  # a NaN is an answer here
        np.maximum.at(top, owner, values)
    return top


def _exponent(top: Float64) -> NDArray[np.int32]:
    return np.asarray(np.frexp(np.where(np.isfinite(top), top, 1.0))[1], dtype=np.int32)


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
        """Disable the compiled tier and keep the first lines of the reason."""
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
