"""The numbers of all tensors of one device, row by row, until one copy takes them to the host.

P tensors are cut into N rows in all; R rows and W scalars are in one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.measure.stats.compiled import KERNELS, PARALLEL, Kernel
from backlight.measure.stats.kernels import narrow, non_finite, wide
from backlight.measure.stats.layout import pieces
from backlight.measure.stats.packing import SMALL, Owned, batches, piece_size
from backlight.measure.transfer.batch import Carrier
from backlight.measure.transfer.pending import Arriving, send

COLUMNS = ("norm", "max_abs", "sum", "nonzero", "nan", "inf")
"""Numbers per row, in the order in which a table sends them."""


_MOST = 2**32  # scalars that a kernel may count in 32 bits per row


class Arrived(NamedTuple):
    """Numbers ``[6, N]`` in the order of :data:`COLUMNS`, and the tensor that owns each row ``[N]``."""

    owner: NDArray[np.int64]
    numbers: NDArray[np.float64]
    carried: float | None


class Table:
    """What one device has measured so far.

    Parameters
    ----------
    device
        Where the tensors are and the numbers stay.
    synchronous
        Whether the host may look at a number without waiting for anybody.
    """

    def __init__(self, device: torch.device, *, synchronous: bool) -> None:
        self._device = device
        self._synchronous = synchronous
        self._columns: tuple[list[Tensor], ...] = tuple([] for _ in COLUMNS)
        self._owners: list[tuple[int, int]] = []
        self._carried: Tensor | None = None
        # Only Apple's device has no float64.
        self._float = torch.float32 if device.type == "mps" else torch.float64

    def eager(self, values: Owned) -> None:
        """Measure tensors of one dtype with torch's own operations."""
        if not values:
            return
        dtype = values[0][1].dtype
        plain = not dtype.is_complex and dtype is not torch.float64 and self._float is torch.float64
        for matrix, owners in batches(values):
            found = narrow(matrix) if plain else wide(matrix, self._float)
            self._add(found if self._synchronous else (*found, *non_finite(matrix)), owners)

    def compiled(self, values: Owned) -> Owned:
        """Measure large tensors of one dtype with the compiled kernel; return what that leaves over."""
        rest: Owned = []
        blocks: list[Tensor] = []
        kernels: dict[bool, Kernel | None] = {}
        owners: list[tuple[int, int]] = []
        try:
            for owner, tensor in values:
                scalars = tensor.numel()
                plain = tensor.dim() == 1 and tensor.is_contiguous()
                other = tensor.is_neg() or tensor.is_inference()  # for which it would be compiled again
                kernel = None
                if plain and not other and SMALL <= scalars <= _MOST:
                    large = scalars >= PARALLEL
                    if large not in kernels:
                        kernels[large] = KERNELS.get(self._device, tensor.dtype, threaded=large)
                    kernel = kernels[large]
                if kernel is None:
                    rest.append((owner, tensor))
                    continue
                matrix, ends = _cut(tensor, kernel)
                blocks.append(kernel.run(matrix))
                owners.append((owner, kernel.rows))
                rest += [(owner, end) for end in ends]
        except Exception as error:  # noqa: BLE001 - compilers fail in every way; training must go on
            KERNELS.fail(error)
            return values
        if blocks:
            self._add(torch.cat(blocks, 1).unbind(), owners)
        return rest

    def count_non_finite(self, values: Owned) -> None:
        """Count NaN and infinity where a norm is not finite: elsewhere there are none.

        Only the host of the memory itself can choose so; on a device both were counted with the rest.
        """
        if not self._synchronous or not self._owners:
            return
        suspect_N = ~np.isfinite(torch.cat(self._columns[0]).numpy())
        if not suspect_N.any():
            return
        among = set(_owner_of_rows(self._owners)[suspect_N].tolist())
        nothing = torch.zeros(1, dtype=self._float)
        # The counts get rows of their own, behind those that counted nothing.
        for column in self._columns[4:]:
            column.append(torch.zeros(len(suspect_N), dtype=self._float))
        for owner, tensor in values:
            for piece in pieces(tensor, piece_size(self._device)[0]) if owner in among else ():
                self._add((*[nothing] * 4, *non_finite(piece.view(1, -1))), [(owner, 1)])

    def carry(self, number: Tensor) -> None:
        """Send a single number of this device, a loss scale for example, with the same copy."""
        self._carried = number.detach().reshape(1).to(self._float)

    def send(self, carrier: Carrier | None = None) -> Arriving:
        """Start the one copy of this device: the columns behind one another, then what is carried."""
        parts = [torch.cat(column).to(self._float) for column in self._columns if column]
        if self._carried is not None:
            parts.append(self._carried)
        table = torch.cat(parts) if parts else torch.empty(0, dtype=self._float)
        return send(table) if carrier is None else carrier.take(table)

    def unpack(self) -> Callable[[NDArray[np.generic]], Arrived]:
        """Return what makes of the numbers on the host what they mean; it holds nothing of the device."""
        owners, carries = self._owners, self._carried is not None

        def unpacked(numbers: NDArray[np.generic]) -> Arrived:
            flat = numbers.astype(np.float64, copy=False)
            carried = float(flat[-1]) if carries else None
            owner = _owner_of_rows(owners)
            table = np.zeros((len(COLUMNS), len(owner)))
            table.reshape(-1)[: len(flat) - carries] = flat[: len(flat) - carries]
            return Arrived(owner, table, carried)

        return unpacked

    def _add(self, columns: Sequence[Tensor], owners: list[tuple[int, int]]) -> None:
        # Four columns where non-finite values are counted later, six where they are counted with the rest.
        for column, values_R in zip(self._columns, columns, strict=False):
            column.append(values_R)
        self._owners += owners


def _cut(tensor: Tensor, kernel: Kernel) -> tuple[Tensor, list[Tensor]]:
    """Return the matrix that a kernel wants, and what of the tensor is left at its ends."""
    scalars = tensor.numel()
    if not kernel.paired:
        over = scalars % kernel.rows
        whole, ends = (tensor[: scalars - over], [tensor[scalars - over :]]) if over else (tensor, [])
        return whole.view(kernel.rows, -1), ends
    begin = tensor.storage_offset() % 2  # pairs begin at even places of the memory
    end = begin + (scalars - begin) // (2 * kernel.rows) * (2 * kernel.rows)
    ends = [part for part in (tensor[:begin], tensor[end:]) if part.numel()]
    return tensor[begin:end].view(torch.int32).view(kernel.rows, -1), ends


def _owner_of_rows(owners: list[tuple[int, int]]) -> NDArray[np.int64]:
    owner, rows = np.array(owners, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(owner, rows)
