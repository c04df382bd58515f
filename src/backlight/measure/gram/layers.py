"""Factors of a module's parameters from its input and the gradient of its output.

N samples along the first dimension; ``delta`` is the gradient of the loss with respect to the output. A
module that received N f rows (samples folded into the first dimension) gives f rows to each sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backlight.measure.gram.factors import Factors, LookupFactors, MatrixFactors, VectorFactors, lengths
from backlight.measure.stats.kernels import promoted

ByName = dict[str, Factors]
"""ByName by the name of the parameter within its module."""


def linear(module: nn.Linear, x: Tensor, delta: Tensor, n: int) -> ByName:
    """Return the factors of a linear layer; ``x [N, ..., i]``, ``delta [N, ..., o]``."""
    d = delta.reshape(n, -1, delta.shape[-1])
    # What autocast multiplied is the input in the type of the output.
    inputs = x.reshape(n, -1, x.shape[-1]).to(delta.dtype).unsqueeze(2)

    uses: ByName = {
        "weight": MatrixFactors(
            d.unsqueeze(2), lambda a, b: inputs[a:b], lambda: lengths(inputs), x.shape[-1], in_memory=True
        )
    }
    if module.bias is not None:
        uses["bias"] = _summed(d)
    return uses


def _summed(d_NTm: Tensor) -> VectorFactors:
    """Sum over positions; the root of the summed squares is kept for the tolerance of a check."""
    values = promoted(d_NTm)
    return VectorFactors(values.sum(1) if values.shape[1] > 1 else values[:, 0], _root(values), d_NTm.dtype)


def _root(values: Tensor) -> Callable[[], Tensor]:
    """Return the function that computes the root of each sample's summed squares, for a check."""
    return lambda: lengths(values.flatten(1))


def embedding(module: nn.Embedding, ids: Tensor, delta: Tensor, n: int) -> ByName:
    """Return the factors of an embedding; ``ids [N, ...]``, ``delta [N, ..., d]``."""
    d, flat = delta.reshape(n, -1, delta.shape[-1]), ids.reshape(n, -1)
    if module.padding_idx is not None:
        d = d.masked_fill((flat == module.padding_idx).unsqueeze(-1), 0)
    return {"weight": LookupFactors(flat, d, module.num_embeddings)}


def layer_norm(module: nn.LayerNorm, x: Tensor, delta: Tensor, n: int) -> ByName:
    """Return the factors of a layer norm, the normalised input recomputed from the input."""
    shape = module.normalized_shape
    return _scaled(module, functional.layer_norm(_promoted_like(x, delta), shape, eps=module.eps), delta, n)


def rms_norm(module: nn.RMSNorm, x: Tensor, delta: Tensor, n: int) -> ByName:
    """Return the factors of an RMS norm."""
    shape = list(module.normalized_shape)
    return _scaled(module, functional.rms_norm(_promoted_like(x, delta), shape, eps=module.eps), delta, n)


def _promoted_like(x: Tensor, delta: Tensor) -> Tensor:
    return x.to(torch.promote_types(promoted(x).dtype, promoted(delta).dtype))


def _scaled(module: nn.LayerNorm | nn.RMSNorm, normal: Tensor, delta: Tensor, n: int) -> ByName:
    width = math.prod(module.normalized_shape)
    d = promoted(delta).reshape(n, -1, width)
    product = d * normal.reshape(n, -1, width)
    uses: ByName = {"weight": VectorFactors(product.sum(1), _root(product), delta.dtype)}
    if getattr(module, "bias", None) is not None:
        uses["bias"] = VectorFactors(d.sum(1), _root(d), delta.dtype)
    return uses


def _by_channel(normal: Tensor, delta: Tensor, n: int) -> ByName:
    """Return the factors of a norm whose weight has one number per channel; ``[N, C, ...]``."""
    shape = (n, -1, delta.shape[1], math.prod(delta.shape[2:]))
    d, x = (tensor.reshape(shape).transpose(1, 2).flatten(2) for tensor in (promoted(delta), normal))
    product = d * x
    return {
        "weight": VectorFactors(product.sum(2), _root(product), delta.dtype),
        "bias": VectorFactors(d.sum(2), _root(d), delta.dtype),
    }


def group_norm(module: nn.GroupNorm, x: Tensor, delta: Tensor, n: int) -> ByName:
    """Return the factors of a group norm; ``x [N, C, ...]``."""
    return _by_channel(
        functional.group_norm(_promoted_like(x, delta), module.num_groups, None, None, module.eps), delta, n
    )


def batch_norm(module: Any, x: Tensor, delta: Tensor, n: int) -> ByName:
    """Return the factors of a batch norm: in training, what each sample's own rows contribute."""
    x = _promoted_like(x, delta)
    if module.training or module.running_mean is None:
        normal = functional.batch_norm(x, None, None, training=True, eps=module.eps)
    else:
        running = module.running_mean.to(x.dtype), module.running_var.to(x.dtype)
        normal = functional.batch_norm(x, *running, eps=module.eps)
    return _by_channel(normal, delta, n)


def convolution(module: Any, x: Tensor, delta: Tensor, n: int) -> ByName:
    """Return the factors of a convolution of 1 to 3 dimensions, unfolded into one product per group.

    ``x [N f, i g, ...]``, ``delta [N f, o g, ...]``. Samples are unfolded when they are needed.
    """
    groups, kernel = module.groups, tuple(module.kernel_size)
    columns = module.in_channels // groups * math.prod(kernel)
    frames = x.shape[0] // n
    out = delta.shape[1] // groups
    d = delta.reshape(n, frames, groups, out, -1).permute(0, 1, 4, 2, 3).reshape(n, -1, groups, out)
    dtype = delta.dtype

    def inputs(a: int, b: int) -> Tensor:
        patches = unfold(module, x[a * frames : b * frames].to(dtype))  # [nf, C, kernel, positions]
        patches = patches.reshape(b - a, frames, groups, columns, -1).permute(0, 1, 4, 2, 3)
        return patches.reshape(b - a, -1, groups, columns)

    def norms() -> Tensor:
        energy = promoted(x).square().reshape(x.shape[0], groups, -1, *x.shape[2:]).sum(2)
        total = unfold(module, energy).sum(2).reshape(n, frames, groups, -1)
        return total.transpose(2, 3).reshape(n, -1, groups).sqrt()

    def direct(a: int, b: int) -> Tensor:
        return per_sample_weight(module, x[a:b].to(dtype), delta[a:b])

    # Elsewhere torch loops over groups, or no measurement speaks for it.
    quick = dtype == torch.float32 and delta.device.type == "cpu" and frames == 1
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    # Per column, patches cost T scalars more than the product; torch lays the rows of a gradient out twice.
    worthwhile = math.prod(kernel) > 1 and d.shape[1] >= 2 * delta.shape[1]
    uses: ByName = {
        "weight": MatrixFactors(
            d,
            inputs,
            norms,
            columns,
            reread=64,
            direct=direct if quick and plain and worthwhile else None,
        )
    }
    if module.bias is not None:
        whole = promoted(delta).reshape(n, frames, delta.shape[1], -1)
        uses["bias"] = VectorFactors(whole.sum((1, 3)), _root(whole), dtype)
    return uses


def per_sample_weight(module: Any, x: Tensor, delta: Tensor) -> Tensor:
    """Return the gradients of a convolution's weight, ``[N, o g, columns]``.

    Samples become groups of one convolution whose weight gradient torch computes; nothing is unfolded.
    """
    n, outputs = delta.shape[:2]
    weight = delta.new_zeros(()).expand(n * outputs, *module.weight.shape[1:])
    _, gradients, _ = torch.ops.aten.convolution_backward(
        delta.reshape(1, -1, *delta.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        weight,
        None,
        module.stride,
        module.padding,
        module.dilation,
        False,
        [0] * (x.dim() - 2),
        n * module.groups,
        [False, True, False],
    )
    return gradients.view(n, outputs, -1)  # type: ignore[no-any-return]


def unfold(module: Any, x: Tensor) -> Tensor:
    """Return the inputs of each output position of a convolution, ``[N, C, kernel elements, positions]``."""
    dimensions = len(module.kernel_size)
    padding: list[int] = []
    for axis in reversed(range(dimensions)):
        size, dilation = module.kernel_size[axis], module.dilation[axis]
        if module.padding == "same":
            total = dilation * (size - 1)
            padding += [total // 2, total - total // 2]
        elif module.padding == "valid":
            padding += [0, 0]
        else:
            padding += [module.padding[axis]] * 2
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = functional.pad(x, padding, mode=mode)
    for axis in range(dimensions):
        size, dilation = module.kernel_size[axis], module.dilation[axis]
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, module.stride[axis])[..., ::dilation]
    order = [0, 1, *range(2 + dimensions, 2 + 2 * dimensions), *range(2, 2 + dimensions)]
    x = x.permute(order)  # positions last, as they lie in memory
    return x.flatten(2 + dimensions).flatten(2, 1 + dimensions)


Layer = Callable[[Any, Tensor, Tensor, int], ByName]

LAYERS: Mapping[Any, Layer] = {
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
}
"""Kernels by class; a class that inherits the forward of one of them is served by it as well."""


def kernel_of(module: nn.Module) -> Layer | None:
    """Return the function that returns the factors of ``module``, or None where its forward is not known."""
    for kind, layer in LAYERS.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return layer
    return None
