"""Any local tensor as flat pieces of bounded size, without a copy where its memory allows that.

N stored places of a sparse tensor with D sparse dimensions. A statistic that does not depend on the
order of the values (all of ours) may read them in the order of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Flat(NamedTuple):
    """The stored values of a tensor; each stands for ``times`` equal scalars (expanded memory repeats).

    Scalars that are stored nowhere, in a sparse tensor, are zeros.
    """

    values: Tensor
    times: int = 1


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
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = _stored_sparse(tensor)
    if tensor.is_contiguous():
        return Flat(tensor if tensor.dim() == 1 else tensor.view(-1))
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            times *= size
            tensor = tensor.narrow(dim, 0, 1)
    return Flat(_in_memory_order(tensor), times)


def pieces(values: Tensor, size: int) -> Iterator[Tensor]:
    """Yield one-dimensional pieces of at most ``size`` scalars that together are ``values``.

    Where the values do not lie densely in memory a piece is a copy, of that size at most.
    """
    scalars = values.numel()
    if scalars == 0:
        return
    if scalars <= size:
        yield values.reshape(-1)
    elif values.dim() == 1 and values.is_contiguous():
        yield from torch.split(values, size)
    else:
        longest = max(range(values.dim()), key=values.shape.__getitem__)
        for part in values.chunk(-(-scalars // size), longest):
            yield from pieces(part, size)


def add_duplicates(tensor: Tensor) -> Tensor:
    """Return values of a sparse COO tensor in which duplicates are added, in a shape that the host knows.

    ``coalesce`` asks the device how many values remain. Here there are as many as before, and those
    that were added to another one leave zeros at the end.
    """
    indices_DN, values = tensor._indices(), tensor._values()
    place_N = torch.zeros(indices_DN.shape[1], dtype=torch.int64, device=tensor.device)
    for dim in range(tensor.sparse_dim()):
        place_N = place_N * tensor.shape[dim] + indices_DN[dim]
    place_N, order_N = place_N.sort(stable=True)
    first_N = torch.ones_like(place_N)
    first_N[1:] = place_N[1:] != place_N[:-1]
    return torch.zeros_like(values).index_add_(0, first_N.cumsum(0) - 1, values[order_N])


def _stored_sparse(tensor: Tensor) -> Tensor:
    if tensor.layout in _COMPRESSED:
        return tensor.values()
    if tensor.layout is not torch.sparse_coo:
        return tensor.to_dense()
    if tensor.is_coalesced():
        return tensor.values()
    return tensor.coalesce().values() if synchronous(tensor.device) else add_duplicates(tensor)


def synchronous(device: torch.device) -> bool:
    """Tell whether the host may look at a number of ``device`` without waiting for anybody."""
    return device.type == "cpu"


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view where the values lie densely in memory, else the tensor."""
    real = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1]
    order = sorted(real, key=tensor.stride, reverse=True)
    dense = 1
    for dim in reversed(order):
        if tensor.stride(dim) != dense:
            return tensor
        dense *= tensor.shape[dim]
    return tensor.permute(order + [dim for dim in range(tensor.dim()) if dim not in real]).view(-1)
