"""The outer product g g^T of one flattened gradient, computed from g on demand and never stored.

The matrix has rank one, so all its spectral norms are |g|^2; entries, rows, blocks and products are computed
when asked for. docs/formulas.md, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from backlight import devices
from backlight.processes import available_memory
from backlight.text import size


class OuterProductError(ValueError):
    """A request that the outer product of a gradient cannot serve."""


Index = int | slice | Sequence[int] | Tensor


class OuterProduct:
    """The matrix g g^T of a gradient g of M numbers.

    Attributes
    ----------
    offsets:
        Where each parameter begins in g, by name, in order.
    """

    def __init__(self, parts: Sequence[tuple[str, Tensor]]) -> None:
        if not parts:
            raise OuterProductError(
                "outer_product: there is no gradient; call backward first, or give tensors"
            )
        self._shapes = {name: tuple(part.shape) for name, part in parts}
        if len(self._shapes) != len(parts):
            raise OuterProductError("outer_product: two gradients have the same name")
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, part in parts:
            self.offsets[name] = offset
            offset += part.numel()
        self._g = torch.cat([part.detach().reshape(-1) for _, part in parts])

    @property
    def shape(self) -> tuple[int, int]:
        """M, M."""
        return len(self._g), len(self._g)

    @property
    def norm(self) -> float:
        """Frobenius norm, |g|^2: also the trace, the spectral and the nuclear norm."""
        return float(torch.linalg.vector_norm(self._g, dtype=torch.float64)) ** 2

    def position(self, name: str, *index: int) -> int:
        """Return the row of the matrix of an entry of a parameter; OuterProductError if there is none."""
        shape = self._shapes.get(name)
        if shape is None:
            raise OuterProductError(
                f"outer_product: no gradient of {name!r}; there are: {', '.join(self._shapes)}"
            )
        inside = len(index) == len(shape) and all(-n <= i < n for i, n in zip(index, shape, strict=True))
        if not inside:
            raise OuterProductError(
                f"outer_product: {name!r} has shape {list(shape)}, got the index {list(index)}"
            )
        wrapped = tuple(i % n for i, n in zip(index, shape, strict=True))
        return self.offsets[name] + (int(np.ravel_multi_index(wrapped, shape)) if shape else 0)

    def entry(self, i: int, j: int) -> float:
        """Return g_i g_j."""
        return float(self._at(i).double() * self._at(j).double())

    def row(self, i: int) -> Tensor:
        """Return row i, ``[M]``, in the type of the gradient."""
        return self._at(i) * self._g

    def block(self, rows: Index, columns: Index) -> Tensor:
        """Return the entries of ``rows`` and ``columns``: slices, indices, or names of parameters."""
        left, right = self._select(rows), self._select(columns)
        self._check_space(len(left) * len(right), f"a block of {len(left)} x {len(right)} entries")
        return torch.outer(left, right)

    def __matmul__(self, v: Tensor) -> Tensor:
        """Return g (g . v) for ``v [M]`` or ``[M, k]``; the inner product is summed in float64."""
        if not v.dim() or v.shape[0] != len(self._g):
            raise OuterProductError(
                f"outer_product: expected {len(self._g)} rows to multiply, got {list(v.shape)}"
            )
        g = self._g.double()
        product: Tensor = torch.tensordot(g, g @ v.double(), dims=0)
        return product.to(torch.promote_types(self._g.dtype, v.dtype))

    def dense(self) -> Tensor:
        """Return the whole matrix ``[M, M]``; OuterProductError beyond half of the available memory."""
        m = len(self._g)
        self._check_space(m * m, f"the dense matrix of {m} x {m} entries")
        return torch.outer(self._g, self._g)

    def _at(self, i: int) -> Tensor:
        if not -len(self._g) <= i < len(self._g):
            raise OuterProductError(f"outer_product: row {i} of {len(self._g)} does not exist")
        return self._g[i]

    def _select(self, index: Index | str) -> Tensor:
        if isinstance(index, str):
            start = self.position(index, *[0] * len(self._shapes.get(index, ())))
            return self._g[start : start + math.prod(self._shapes[index])]
        if isinstance(index, int):
            return self._at(index).reshape(1)
        try:
            return self._g[index] if isinstance(index, (slice, Tensor)) else self._g[list(index)]
        except IndexError as error:
            raise OuterProductError(f"outer_product: {error}; there are {len(self._g)} rows") from error

    def _check_space(self, entries: int, what: str) -> None:
        needed, free = entries * self._g.element_size(), _free_memory(self._g.device)
        if free is not None and needed > free / 2:
            raise OuterProductError(
                f"outer_product: {what} takes {size(needed)}, {size(free)} of memory are available on "
                f"{self._g.device}; ask for entries, rows or blocks, or multiply by vectors"
            )


def _free_memory(device: torch.device) -> int | None:
    return devices.free_memory(device) if devices.is_accelerator(device) else available_memory()


def outer_product(gradients: nn.Module | Tensor | Iterable[Any]) -> OuterProduct:
    """Return the outer product of one gradient with itself, served on demand.

    Parameters
    ----------
    gradients
        A module, whose ``.grad`` are taken; a tensor; or tensors, or pairs of name and tensor. A tensor that
        requires a gradient stands for its ``.grad``.

    Returns
    -------
    OuterProduct

    Raises
    ------
    OuterProductError
        If there is no gradient, or names repeat.
    """
    if isinstance(gradients, nn.Module):
        named: list[tuple[str, Tensor]] = list(gradients.named_parameters())
    elif isinstance(gradients, Tensor):
        named = [("gradient", gradients)]
    else:
        named = [
            item if isinstance(item, tuple) else (str(number), item) for number, item in enumerate(gradients)
        ]
    parts = []
    for name, tensor in named:
        values = tensor.grad if tensor.requires_grad else tensor
        if values is not None:
            parts.append((name, values.to_dense() if values.is_sparse else values))
    return OuterProduct(parts)
