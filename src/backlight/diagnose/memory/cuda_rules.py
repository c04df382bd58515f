"""What CUDA would do with the tensors of a prediction, which are fake ones of the CPU.

The rules of the CPU keep other tensors than those of CUDA: ``torch.autocast("cuda")`` is switched off where
there is no GPU, autocast treats other operations in float32, attention with dropout takes a kernel that keeps
all its weights, dropout keeps its mask as numbers, and optimizers go from parameter to parameter. While
:class:`CudaRules` is entered, autocast follows the list of CUDA, which torch's dispatcher holds on every
machine, attention takes the kernel that CUDA would choose, masks of dropout are bytes, and optimizers take
all parameters at once where the script leaves it to them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import autocast
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

# By policy as in ATen/autocast_mode.h; what CUDA lists and is in none of these is computed in float32.
_LOWER = frozenset({
    "_convolution", "convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "cudnn_convolution", "cudnn_convolution_transpose", "prelu",
    "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm",
    "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
})  # fmt: skip
_WIDEST = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add",
})  # fmt: skip
_FLOAT32_RESULT = frozenset({
    "prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum"
})  # fmt: skip

MAX_FLASH_DIM = 256
"""Size of a head up to which the flash kernel of CUDA takes it (sm80 and later)."""

FLASH, EFFICIENT, MATH = "flash", "memory-efficient", "math"


class CudaRules(AbstractContextManager["CudaRules"]):
    """Rules of CUDA, in this process, while it is entered.

    ``attention`` counts the calls by the kernel that was assumed, ``autocast`` is whether a region of
    autocast was entered, ``foreach`` whether an optimizer was left to choose how it goes over parameters.
    """

    def __init__(self) -> None:
        self.attention: Counter[str] = Counter()
        self.autocast = self.foreach = False
        self._stack = ExitStack()

    def __enter__(self) -> CudaRules:
        """Replace the kernels of autocast and attention."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's
        self._stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for name, kernel in _autocast_kernels():
                library.impl(name, kernel, "AutocastCPU")
            for key in ("CPU", "AutogradCPU"):
                library.impl("scaled_dot_product_attention", self._attend, key)
                library.impl("dropout", _drop, key)
        self._redirect_autocast()
        for name, replacement in (
            ("_get_foreach_kernels_supported_devices", self._foreach_devices),
            ("_foreach_supported_types", [torch.Tensor, torch.nn.Parameter, FakeTensor]),
        ):
            self._stack.enter_context(mock.patch.object(optimizers, name, replacement))
        return self

    def _foreach_devices(self) -> list[str]:
        self.foreach = True
        return ["cpu"]

    def __exit__(self, *exception: object) -> None:
        """Put everything back."""
        self._stack.close()

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed of the device, in words."""
        calls = ", ".join(f"{kernel} for {count}" for kernel, count in self.attention.most_common())
        many = "s" if self.attention.total() > 1 else ""
        return (
            *(("autocast by the list of CUDA, not by that of the CPU",) if self.autocast else ()),
            *((f"kernels of attention: {calls} call{many}",) if calls else ()),
            *(("optimizer over all parameters at once (foreach)",) if self.foreach else ()),
        )

    def _redirect_autocast(self) -> None:
        """Let regions for any device hold for the tensors of the CPU, which stand for its own."""
        begin, is_enabled, dtype_of = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

        def begin_on_cpu(region: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            begin(region, "cpu", dtype_of(device_type) if dtype is None else dtype, *args, **kwargs)
            self.autocast = self.autocast or region._enabled

        def chosen(device_type: str = "cuda") -> torch.dtype:
            return dtype_of("cpu" if is_enabled("cpu") else device_type)

        for owner, name, replacement in (
            (autocast, "__init__", begin_on_cpu),
            (torch, "is_autocast_enabled", lambda device_type="cpu": is_enabled("cpu")),
            (torch, "get_autocast_dtype", chosen),
            (torch, "get_autocast_gpu_dtype", chosen),
        ):
            self._stack.enter_context(mock.patch.object(owner, name, replacement))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        kernel = attention_kernel(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        self.attention[kernel] += 1
        if kernel == FLASH:
            return aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        if kernel == EFFICIENT:
            keeps = torch.is_grad_enabled() and (
                query.requires_grad or key.requires_grad or value.requires_grad
            )
            mask = attn_mask
            if mask is not None:
                if mask.dtype is torch.bool:
                    mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
                        mask.logical_not(), float("-inf")
                    )
                mask = mask.expand(*query.shape[:-1], key.shape[-2])
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]


def _drop(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or not input.numel():
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype)
    return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]


def attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """Return the kernel that CUDA takes, by the conditions of ATen/native/transformers/cuda/sdp_utils.cpp.

    That of cuDNN, which some devices prefer, keeps what the flash kernel keeps.
    """
    allowed: Any = torch.backends.cuda
    last = query.shape[-1]
    is_plain = query.dim() == key.dim() == value.dim() == 4 and all(x.numel() for x in (query, key, value))
    is_like = last == key.shape[-1] == value.shape[-1] and query.dtype == key.dtype == value.dtype
    is_half = query.dtype in {torch.float16, torch.bfloat16}
    if (
        is_plain
        and is_like
        and is_half
        and last <= MAX_FLASH_DIM
        and mask is None
        and allowed.flash_sdp_enabled()
    ) and (not is_causal or query.shape[-2] == key.shape[-2]):
        return FLASH
    is_aligned = last % (8 if is_half else 4) == value.shape[-1] % (8 if is_half else 4) == 0
    is_narrow = is_half or query.dtype is torch.float32
    free = mask is None or not mask.requires_grad
    if (
        is_plain
        and is_narrow
        and is_aligned
        and free
        and not enable_gqa
        and allowed.mem_efficient_sdp_enabled()
    ):
        return EFFICIENT
    return MATH


# Autocast


def _autocast_kernels() -> list[tuple[str, Any]]:
    """Return the kernel of each operation that autocast treats otherwise on CUDA than on the CPU."""
    kernels = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        on_cuda, on_cpu = (
            torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
            for key in ("AutocastCUDA", "AutocastCPU")
        )
        op, base = name.removeprefix("aten::"), name.removeprefix("aten::").partition(".")[0]
        if not on_cuda:
            kernels += [(op, torch.library.fallthrough_kernel)] if on_cpu else []
        elif base in _FLOAT32_RESULT:
            kernels.append((op, _with_float32_result(_overload(op))))
        elif base in _WIDEST:
            kernels.append((op, _with_casts(_overload(op), _widest)))
        elif not on_cpu:
            kernels.append((op, _with_casts(_overload(op), _lower if base in _LOWER else _float32)))
    return kernels


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _float32(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _lower(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32 if any(t.dtype is torch.float32 for t in tensors) else _lower(tensors)


def _with_casts(operation: Any, dtype_for: Callable[[list[torch.Tensor]], torch.dtype]) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            tensors: list[torch.Tensor] = []
            tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
            dtype = dtype_for([tensor for tensor in tensors if _is_cast(tensor)])

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(dtype) if _is_cast(tensor) else tensor

            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            return operation(*args, **kwargs)

    return kernel


def _with_float32_result(operation: Any) -> Any:
    """Compute in float32 without a copy of the input, where the caller has not chosen a type."""
    names = [argument.name for argument in operation._schema.arguments]
    fused = {aten.softmax: aten._softmax, aten.log_softmax: aten._log_softmax}.get(operation._overloadpacket)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            arguments = dict(zip(names, args, strict=False)) | kwargs
            if "dtype" not in names or arguments.get("dtype") is not None or not _is_cast(args[0]):
                return operation(*args, **kwargs)
            if fused is not None and args[0].dtype is torch.float16:  # CUDA reads float16, writes float32
                return fused(args[0], arguments["dim"], True)
            arguments["dtype"] = torch.float32
            count = sum(not argument.kwarg_only for argument in operation._schema.arguments)
            return operation(
                *(arguments[name] for name in names[:count] if name in arguments),
                **{name: arguments[name] for name in names[count:] if name in arguments},
            )

    return kernel
