"""Tensors of any layout as few matrices: small tensors share one matrix, large ones are cut into several.

A launch per tensor costs more than the arithmetic of a bias. So small tensors are copied next to each other
into one buffer, each padded with zeros to whole rows, and large ones are viewed in chunks. No statistic
depends on the order of the values, so they are read in the order of memory.

N stored positions of a sparse tensor with D sparse dimensions; matrices have R rows of W scalars.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from backlight.measure.stats.kernels import SCRATCH

SMALL_ROW = 256
"""Scalars in a row that small tensors are padded to."""

SMALL = 2**17
"""Scalars below which a tensor is copied together with others; from here on a copy costs more than it
saves."""

Owned = list[tuple[int, Tensor]]
"""Stored values, each with the position of the tensor that owns them."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Stored(NamedTuple):
    """The stored values of a tensor; each stands for ``times`` equal scalars (expanded memory repeats).

    The scalars that a sparse tensor does not store are zeros.
    """

    values: Tensor
    times: int = 1


def is_host(device: torch.device) -> bool:
    """Return whether the host can read a number of ``device`` without synchronising."""
    return device.type == "cpu"


def stored(tensor: Tensor) -> Stored:
    """Return the stored values of a strided or sparse tensor; integers raise TypeError.

    They are a contiguous view of its memory for a dense tensor in any permutation, except for an uncoalesced
    sparse tensor, whose duplicates are added first.

    Raises
    ------
    TypeError
        If the tensor holds integers.
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
        return Stored(tensor)
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            times *= size
            tensor = tensor.narrow(dim, 0, 1)
    return Stored(_in_memory_order(tensor), times)


def _stored_sparse(tensor: Tensor) -> Tensor:
    if tensor.layout in _COMPRESSED:
        return tensor.values()
    if tensor.layout is not torch.sparse_coo:
        return tensor.to_dense()
    if tensor.is_coalesced():
        return tensor.values()
    return tensor.coalesce().values() if is_host(tensor.device) else add_duplicates(tensor)


def add_duplicates(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor with duplicates added, in a shape that the host knows.

    ``coalesce`` asks the device how many values remain. Here there are as many as before: a value that was
    added to another one leaves a zero at the end.
    """
    indices_DN, values = tensor._indices(), tensor._values()
    index_N = torch.zeros(indices_DN.shape[1], dtype=torch.int64, device=tensor.device)
    for dim in range(tensor.sparse_dim()):
        index_N = index_N * tensor.shape[dim] + indices_DN[dim]
    index_N, order_N = index_N.sort(stable=True)
    first_N = torch.ones_like(index_N)
    first_N[1:] = index_N[1:] != index_N[:-1]
    return torch.zeros_like(values).index_add_(0, first_N.cumsum(0) - 1, values[order_N])


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


def chunks(values: Tensor, size: int) -> Iterator[Tensor]:
    """Yield one-dimensional chunks of at most ``size`` scalars that together are ``values``.

    Where the values do not lie densely in memory, a chunk is a copy of at most that size.
    """
    scalars = values.numel()
    if scalars == 0:
        return
    if scalars <= size:
        yield values.reshape(-1)
    elif values.is_contiguous():
        yield from torch.split(values.view(-1), size)
    else:
        longest = max(range(values.dim()), key=values.shape.__getitem__)
        for part in values.chunk(-(-scalars // size), longest):
            yield from chunks(part, size)


def chunk_size(device: torch.device) -> tuple[int, int]:
    """Return how many scalars are processed at once, and how many of them form a row."""
    if device.type != "cpu":
        return 2**22, 2**16
    # On one thread a chunk in float64 still fits the second-level cache. On several it stays below the size
    # from which torch wakes other threads for each operation: for so little work that takes longer.
    return (2**18 if torch.get_num_threads() == 1 else 7 * 2**12), 2**12


class Matrix(NamedTuple):
    """A matrix ``[R, W]`` and, in order, each tensor that owns rows of it with their number."""

    rows: Tensor
    owners: list[tuple[int, int]]


def matrices(values: Owned) -> Iterator[Matrix]:
    """Yield the scalars of tensors of one type and device as matrices of at most :func:`chunk_size`.

    A matrix is valid until the next one is asked for.
    """
    if not values:
        return
    size, width = chunk_size(values[0][1].device)
    packer = _Packer(size)
    for owner, tensor in values:
        small = tensor.numel() < min(SMALL, size)
        flat = tensor if tensor.dim() == 1 else tensor.reshape(-1) if small else tensor
        for chunk in (flat,) if small else chunks(tensor, size):
            if chunk.numel() == size:
                yield Matrix(chunk.view(-1, width), [(owner, size // width)])
                continue
            if not packer.add(owner, chunk):
                yield packer.pack()
                packer.add(owner, chunk)
    if packer.rows:
        yield packer.pack()


class _Packer:
    """Flat values of several tensors next to each other, each padded with zeros to whole rows."""

    def __init__(self, size: int) -> None:
        self.rows = 0
        self._max_rows = size // SMALL_ROW
        self._values: list[Tensor] = []
        self._owners: list[tuple[int, int]] = []
        self._padding: dict[int, Tensor] = {}

    def add(self, owner: int, values: Tensor) -> bool:
        """Add flat values, which are not copied yet; False where :meth:`pack` must run before."""
        scalars = values.numel()
        rows = -(-scalars // SMALL_ROW)
        if self.rows and self.rows + rows > self._max_rows:
            return False
        self.rows += rows
        self._values.append(values)
        self._owners.append((owner, rows))
        missing = rows * SMALL_ROW - scalars
        if missing:
            if missing not in self._padding:
                self._padding[missing] = values.new_zeros(missing)
            self._values.append(self._padding[missing])
        return True

    def pack(self) -> Matrix:
        """Copy the added values into one matrix and start afresh."""
        first = self._values[0]
        buffer = SCRATCH.take("packed", (self.rows * SMALL_ROW,), first.dtype, first.device)
        matrix = Matrix(torch.cat(self._values, out=buffer).view(self.rows, SMALL_ROW), self._owners)
        self.rows, self._values, self._owners = 0, [], []
        return matrix
