"""Norm, largest magnitude, sum and counts of every tensor of a list, in one pass over the memory.

P tensors, cut into N rows in all. Squares are summed in float64, those of float64 and complex values
after scaling by a power of two: what fp32 cannot hold needs no second look. A device is only ever given
work; the host puts the rows together after their one copy, when it is asked to.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.measure.stats.compiled import DTYPES, KERNELS, PATIENCE
from backlight.measure.stats.layout import stored, synchronous
from backlight.measure.stats.norms import max_by, root_sum_squares_by
from backlight.measure.stats.packing import Owned, large_share
from backlight.measure.stats.table import COLUMNS, Arrived, Table
from backlight.measure.transfer.batch import Carrier
from backlight.measure.transfer.pending import Arrays, Pending

FLOATS = ("norm", "max_abs", "sum")
"""Names of the float64 columns, in order."""

INTEGERS = ("measured", "numel", "zeros", "nan", "inf")
"""Names of the int64 columns, in order."""

Tier = Literal["auto", "eager", "compiled"]


def statistics(
    tensors: Sequence[Tensor | None],
    *,
    tier: Tier = "auto",
    scale: Tensor | float | None = None,
    carrier: Carrier | None = None,
) -> Pending:
    """Measure every tensor.

    Parameters
    ----------
    tensors
        P local tensors of any floating or complex type, layout, stride and device; None where there is
        nothing to measure.
    tier
        ``"eager"`` uses torch's own operations, ``"compiled"`` a kernel of ``torch.compile`` for large
        tensors of at most 32 bits (eager where that fails, see :func:`why_not_compiled`). ``"auto"``
        begins eagerly and compiles once the eager work of this process has cost as much as compiling
        would, so that it never costs twice the better choice.
    scale
        What all values are to be divided by, a loss scale for example. The results are divided, not
        the tensors; a tensor on a device comes to the host with the results.
    carrier
        Takes the results along with others of the same step; without one they travel at once.

    Returns
    -------
    Pending
        float64 ``[P, 3]`` in the order of :data:`FLOATS` and int64 ``[P, 5]`` in that of :data:`INTEGERS`.
        ``norm`` and ``max_abs`` are NaN where any value is NaN, else infinite where any is infinite.
        Of complex values they are those of the magnitude, and ``sum`` is the sum of the real parts.
        An empty tensor is measured: norm, max_abs and sum are 0.

    Raises
    ------
    TypeError
        If a tensor holds integers.
    """
    if torch.compiler.is_compiling():  # a pass inside somebody's graph would become a part of it
        tensors = [None] * len(tensors)
    shares = [(0, 0)] * len(tensors)  # times and numel
    kinds: dict[tuple[torch.device, torch.dtype], Owned] = {}
    tables: dict[torch.device, Table] = {}
    with torch.no_grad():
        for position, tensor in enumerate(tensors):
            if tensor is None or tensor.is_meta:
                continue
            values, times = stored(tensor)
            shares[position] = (times, tensor.numel())
            kinds.setdefault((values.device, values.dtype), []).append((position, values))
        for (device, dtype), owned in kinds.items():
            table = _table(tables, device)
            rest = table.compiled(owned) if _compiles(tier, dtype) else owned
            begin = perf_counter()
            table.eager(rest)
            if dtype in DTYPES:
                PATIENCE.spend((perf_counter() - begin) * large_share(rest))
        for device, table in tables.items():
            table.count_non_finite(
                [pair for kind, owned in kinds.items() if kind[0] == device for pair in owned]
            )
        if isinstance(scale, Tensor):
            _table(tables, scale.device).carry(scale)
        flights = [table.send(carrier) for table in tables.values()]
    unpack = [table.unpack() for table in tables.values()]
    divisor = 1.0 if scale is None or isinstance(scale, Tensor) else float(scale)

    def finish(arrived: list[NDArray[np.generic]]) -> Arrays:
        parts = [unpacked(numbers) for unpacked, numbers in zip(unpack, arrived, strict=True)]
        return _finish(np.array(shares, dtype=np.int64).reshape(-1, 2), parts, divisor)

    return Pending(flights, finish)


def tier_in_use(tier: Tier = "auto") -> Literal["eager", "compiled"]:
    """Return the tier that the next large float32 tensor is measured by, if ``tier`` is asked for."""
    return "compiled" if _compiles(tier, torch.float32) else "eager"


def why_not_compiled() -> str:
    """Return why the compiled tier is not available in this process; empty while nothing has failed."""
    return KERNELS.reason


def _compiles(tier: Tier, dtype: torch.dtype) -> bool:
    if dtype not in DTYPES or KERNELS.reason:
        return False
    return tier == "compiled" or (tier == "auto" and PATIENCE.exhausted())


def _table(tables: dict[torch.device, Table], device: torch.device) -> Table:
    if device not in tables:
        tables[device] = Table(device, synchronous=synchronous(device))
    return tables[device]


def _finish(shares_P2: NDArray[np.int64], parts: list[Arrived], divisor: float) -> Arrays:
    """Put the rows of all devices together."""
    times_P, numel_P = shares_P2.T
    size = len(times_P)
    owner = np.concatenate([np.empty(0, dtype=np.int64), *(part.owner for part in parts)])
    norm, top, total, nonzero, nan, inf = np.concatenate(
        [np.empty((len(COLUMNS), 0)), *(part.numbers for part in parts)], axis=1
    )
    for part in parts:
        divisor = divisor if part.carried is None else part.carried
    counts = np.stack(
        (
            times_P > 0,
            numel_P,
            numel_P - times_P * _count(owner, nonzero, size),
            times_P * _count(owner, nan, size),
            times_P * _count(owner, inf, size),
        ),
        axis=1,
    )
    with np.errstate(all="ignore"):
        values = np.stack(
            (
                root_sum_squares_by(owner, norm, size) * np.sqrt(times_P),
                max_by(owner, top, size),
                np.bincount(owner, total, size) * times_P,
            ),
            axis=1,
        )
        # Beside an infinity a norm may miss a NaN; no number may depend on how the tensor was cut.
        values[counts[:, 3] > 0, :2] = np.nan
        values /= divisor
    values[times_P == 0] = 0.0
    return values, counts


def _count(owner: NDArray[np.int64], numbers: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    return np.asarray(np.bincount(owner, numbers, size), dtype=np.int64)
