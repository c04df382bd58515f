"""Numbers of one output of a layer, and of the gradient that arrives there, on the device of the tensor.

Nothing here reads a value or waits for a device: every result is a tensor. Sums are accumulated in the widest
type of the device, over rows that are short enough for fp32. docs/formulas.md, section 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backlight.devices import widest_float

ROW = 256
"""Values whose squares are added up in the tensor's own type, or in fp32: rounding stays below 1e-6."""

RANK_ROWS, RANK_COLUMNS = 256, 1024
"""Size of the part of an output whose effective rank is computed, at most."""

MEASURED_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Types of the outputs that are measured."""

INTERVALS: dict[str, tuple[float | None, float | None]] = {
    "Tanh": (-0.99, 0.99),
    "Sigmoid": (0.01, 0.99),
    "Hardsigmoid": (0.01, 0.99),
    "ReLU6": (None, 6.0),
}
"""Values between which an activation is not saturated, by class; None where that end is no saturation."""

SHARP = 0.999
"""The largest value of a softmax above which a row of it is saturated."""


def dense(x: Tensor) -> Tensor | None:
    """Return the values of ``x`` as one dimension without a copy, None where its memory has gaps."""
    if not x.is_contiguous():
        strides = x.stride()
        x = x.permute(sorted(range(x.ndim), key=lambda d: -strides[d]))
    return x.view(-1) if x.is_contiguous() else None


def norm(x: Tensor) -> Tensor:
    """Return the L2 norm of ``x``, a tensor without dimensions; NaN or infinite where a value is."""
    wide, narrow = widest_float(x.device), torch.float64 if x.dtype is torch.float64 else torch.float32
    flat = dense(x)
    if flat is None:
        rows = torch.linalg.vector_norm(x, dim=-1, dtype=narrow).reshape(-1)
        total: Tensor = torch.linalg.vector_norm(rows, dtype=wide)
        return total
    whole = flat.numel() // ROW * ROW
    parts = [torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=narrow)] if whole else []
    if whole < flat.numel():
        parts.append(torch.linalg.vector_norm(flat[whole:], dtype=narrow).reshape(1))
    total = torch.linalg.vector_norm(torch.cat(parts) if len(parts) > 1 else parts[0], dtype=wide)
    return total  # noqa: RET504 - its type is declared above


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of every position of the first dimension of ``x``."""
    return x.amin(0), x.amax(0)


def spread(low: Tensor, high: Tensor) -> Tensor:
    """Return the largest difference between two samples, relative to the largest magnitude; 0 for zeros.

    ``low`` and ``high`` are the extremes over the samples. NaN where a value is not finite.
    """
    wide = widest_float(low.device)
    low, high = low.to(wide), high.to(wide)
    size = torch.maximum(-low.amin(), high.amax())
    return torch.where(size == 0, torch.zeros_like(size), (high - low).amax() / size)


def by_unit(low: Tensor, high: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Return the extremes of each unit, from those over the samples; ``unit`` is its dimension in these."""
    others = [d for d in range(low.ndim) if d != unit % low.ndim]
    return (low.amin(others), high.amax(others)) if others else (low, high)


def zeros(x: Tensor) -> Tensor:
    """Return how many values of ``x`` are exactly zero."""
    return torch.count_nonzero(x == 0)


def saturated(x: Tensor, kind: str, low: float | None, high: float | None, dim: int | None) -> Tensor:
    """Return the share of values of an activation that are saturated, of a softmax that of its rows.

    ``low`` and ``high`` bound what is not saturated; of clipping activations the bounds count as well.
    """
    if kind in {"Softmax", "Softmax2d"}:
        largest = x.amax(-3 if kind == "Softmax2d" else -1 if dim is None else dim)
        return torch.count_nonzero(largest > SHARP).to(widest_float(x.device)) / largest.numel()
    is_clipped = kind not in {"Tanh", "Sigmoid"}
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    if low is not None:
        count = count + torch.count_nonzero(x <= low if is_clipped else x < low)
    if high is not None:
        count = count + torch.count_nonzero(x >= high if is_clipped else x > high)
    return count.to(widest_float(x.device)) / x.numel()


def effective_rank(x: Tensor, unit: int) -> Tensor:
    """Return the participation ratio of the directions in which the units of an output vary.

    That is ``(sum s^2)^2 / sum s^4`` over the singular values of the centred matrix of positions by units, of
    at most ``RANK_ROWS`` evenly spread positions and ``RANK_COLUMNS`` units. NaN where nothing varies.
    """
    rows = x.movedim(unit, -1)
    rows = rows[:: -(-len(rows) // RANK_ROWS)].flatten(0, -2)  # few samples first: the next line copies
    rows = rows[:: -(-len(rows) // RANK_ROWS), :: -(-rows.shape[1] // RANK_COLUMNS)]
    rows = rows.to(widest_float(x.device))
    rows = rows - rows.mean(0)
    gram = rows @ rows.mT if len(rows) < rows.shape[1] else rows.mT @ rows
    return gram.trace().square() / gram.square().sum()
