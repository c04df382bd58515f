"""Any local tensor as flat pieces of bounded size, without a copy where its memory allows that.

M scalars in all. A statistic that does not depend on the order of the values (all of ours) may read
them in the order of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2**17
"""Elements of a piece: a float64 copy of one (1 MiB) still fits a second-level cache."""

_SPARSE_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


class Flat(NamedTuple):
    """The stored values of a tensor.

    ``values`` has every stored value once; each stands for ``times`` equal scalars of the tensor
    (an expanded tensor repeats its memory). ``absent`` scalars are zeros that no memory holds
    (the structural zeros of a sparse tensor).
    """

    values: Tensor
    times: int = 1
    absent: int = 0


def stored(tensor: Tensor) -> Flat:
    """Return the stored values of a strided or sparse tensor.

    Values are a view of the tensor's memory except for an uncoalesced sparse tensor, whose duplicates
    must be added first. A dense tensor in any permutation comes back one-dimensional.

    Raises
    ------
    TypeError
        If the tensor holds integers, for which gradient statistics mean nothing.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"statistics are for floating-point and complex tensors, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}; leave it out or convert it with .float()"
        )
    tensor = tensor.detach()
    absent = 0
    if tensor.layout is not torch.strided:
        scalars = tensor.numel()
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce().values()
        elif tensor.layout in _SPARSE_ROWS or tensor.layout in _SPARSE_COLUMNS:
            tensor = tensor.values()
        else:
            tensor = tensor.to_dense()
        absent = scalars - tensor.numel()
    if tensor.is_contiguous():
        return Flat(tensor.view(-1), 1, absent)
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            times *= size
            tensor = tensor.narrow(dim, 0, 1)
    return Flat(_in_memory_order(tensor), times, absent)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view where the values lie densely in memory, else the tensor."""
    order = sorted(
        (dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1), key=tensor.stride, reverse=True
    )
    dense = 1
    for dim in reversed(order):
        if tensor.stride(dim) != dense:
            return tensor
        dense *= tensor.shape[dim]
    return tensor.permute(order + [d for d in range(tensor.dim()) if tensor.shape[d] == 1]).view(-1)


def pieces(values: Tensor, size: int = CHUNK) -> Iterator[Tensor]:
    """Yield one-dimensional pieces of at most ``size`` scalars that together are ``values``.

    Where the values do not lie densely in memory a piece is a copy, of that size at most.
    """
    scalars = values.numel()
    if scalars == 0:
        return
    if scalars <= size or values.dim() <= 1:
        flat = values.reshape(-1)
        if scalars <= size:
            yield flat
        else:
            yield from torch.split(flat, size)
        return
    dim = max(range(values.dim()), key=values.shape.__getitem__)
    for part in values.chunk(-(-scalars // size), dim):
        yield from pieces(part, size)
