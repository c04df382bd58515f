"""Norm, largest magnitude, sum and counts of every tensor of a list, in one pass over the memory.

P tensors, cut into N rows in all; a matrix has R rows of W scalars. Squares are summed in float64, those of
float64 and complex values after scaling by a power of two: what float32 cannot hold needs no second pass. A
device is only given work; the host joins the rows after their one copy. docs/formulas.md, section 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight import clock
from backlight.devices import widest_float
from backlight.measure.stats.compiled_rows import COMPILED_ROWS, DTYPES, CompiledRows, is_plain
from backlight.measure.stats.fused_rows import FusedRows, failures, fused_rows
from backlight.measure.stats.kernels import max_by, narrow, non_finite, root_sum_squares_by, wide
from backlight.measure.stats.packed_matrices import Owned, chunk_size, chunks, is_host, matrices, stored
from backlight.measure.transfer import Arrays, HostParts, PendingArrays, Transfer, TransferBatch, start_copy

COLUMNS = ("norm", "max_abs", "sum", "nonzero", "nan", "inf")
"""Numbers per row, in the order in which they are copied to the host."""

Tier = Literal["auto", "eager", "background", "compiled"]

_WORTHWHILE = 2**18
"""Scalars from which a pass that is called by hand is compiled at its first call."""

_PART = 2**23
"""Scalars that are measured eagerly before a look whether the compiled pass is there."""


def statistics(
    tensors: Sequence[Tensor | None],
    *,
    tier: Tier = "auto",
    scale: Tensor | float | None = None,
    transfer: TransferBatch | None = None,
) -> PendingArrays:
    """Measure every tensor.

    Parameters
    ----------
    tensors
        P local tensors of any floating or complex type, layout, stride and device; None where there is
        nothing to measure.
    tier
        ``"eager"`` uses torch's own operations. ``"auto"`` starts eagerly and requests a compiled pass: over
        tensors on the host once the eager work of this process has cost as much as compiling would, over
        those on a device at once. What is compiled serves as soon as it is there. ``"background"`` requests
        it at once for tensors on the host as well, unless they are small; ``"compiled"`` waits for it (eager
        where it fails, see :func:`why_not_compiled`).
    scale
        Divisor of all values, for example a loss scale. The results are divided, not the tensors; a tensor
        on a device is copied to the host with the results.
    transfer
        Copies the results together with others of the same step; without one they are copied at once.

    Returns
    -------
    Pending
        float64 ``[P, 3]`` and int64 ``[P, 5]``, the columns of :data:`backlight.series.GRADIENT`.
        ``norm`` and ``max_abs`` are NaN where any value is NaN, else infinite where any is infinite. Of
        complex values they are those of the magnitude, and ``sum`` is the sum of the real parts. An empty
        tensor is measured as 0, 0, 0.

    Raises
    ------
    TypeError
        If a tensor holds integers.
    """
    if torch.compiler.is_compiling():  # a pass inside the user's graph would become a part of it
        tensors = [None] * len(tensors)
    shares = [(0, 0)] * len(tensors)  # times and numel
    kinds: dict[tuple[torch.device, torch.dtype], Owned] = {}
    tables: dict[torch.device, _Table] = {}
    with torch.no_grad():
        for position, tensor in enumerate(tensors):
            if tensor is None or tensor.is_meta:
                continue
            values, times = stored(tensor)
            shares[position] = (times, tensor.numel())
            kinds.setdefault((values.device, values.dtype), []).append((position, values))
        for (device, dtype), owned in kinds.items():
            table = _table(tables, device)
            compiled = None if tier == "eager" or dtype not in DTYPES else _compiled_pass(device)
            if compiled is None:
                table.eager(owned)
                continue
            if tier == "compiled":
                compiled.wait()
            elif tier == "background" and sum(values.numel() for _, values in owned) >= _WORTHWHILE:
                compiled.request()
            for part in [owned] if compiled.is_ready() else _parts(owned):
                if compiled.is_ready():
                    table.eager(table.compiled(part, compiled))
                else:
                    begin = clock.thread_time()
                    table.eager(part)
                    compiled.spend(clock.thread_time() - begin)
        for device, table in tables.items():
            table.count_non_finite(
                [pair for kind, owned in kinds.items() if kind[0] == device for pair in owned]
            )
        if isinstance(scale, Tensor):
            _table(tables, scale.device).append(scale)
        transfers: list[Transfer] = []
        decoders: list[Callable[[NDArray[np.generic]], _Rows]] = []
        for table in tables.values():
            transfers.append(table.start_copy(transfer))
            decoders.append(table.decoder())
    divisor = 1.0 if scale is None or isinstance(scale, Tensor) else float(scale)

    def finish(received: list[NDArray[np.generic]]) -> Arrays:
        rows = [decode(numbers) for decode, numbers in zip(decoders, received, strict=True)]
        return _join(np.array(shares, dtype=np.int64).reshape(-1, 2), rows, divisor)

    return PendingArrays(transfers, finish)


def _parts(owned: Owned) -> Iterator[Owned]:
    """Yield values in runs of at least :data:`_PART` scalars."""
    part: Owned = []
    scalars = 0
    for pair in owned:
        part.append(pair)
        scalars += pair[1].numel()
        if scalars >= _PART:
            yield part
            part, scalars = [], 0
    if part:
        yield part


def why_not_compiled() -> str:
    """Return why a compiled tier is not available in this process; empty while nothing has failed."""
    return "; ".join(filter(None, (COMPILED_ROWS.reason, *failures())))


def _compiled_pass(device: torch.device) -> CompiledRows | FusedRows | None:
    compiled = COMPILED_ROWS if is_host(device) else fused_rows(device)
    return None if compiled is None or compiled.reason else compiled


def _table(tables: dict[torch.device, _Table], device: torch.device) -> _Table:
    if device not in tables:
        tables[device] = _Table(device, on_host=is_host(device))
    return tables[device]


class _Rows(NamedTuple):
    """Numbers ``[6, N]`` in the order of :data:`COLUMNS`, and the tensor that owns each row ``[N]``."""

    owner: NDArray[np.int64]
    numbers: NDArray[np.float64]
    scale: float | None


class _Table:
    """The numbers of all tensors of one device, row by row, until one copy takes them to the host."""

    def __init__(self, device: torch.device, *, on_host: bool) -> None:
        self._device = device
        self._on_host = on_host
        self._columns: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
        self._owners: list[tuple[int, int]] = []
        self._scale: Tensor | None = None
        self._float = widest_float(device)

    def eager(self, values: Owned) -> None:
        """Measure tensors of one dtype with torch's own operations."""
        if not values:
            return
        dtype = values[0][1].dtype
        plain = not dtype.is_complex and dtype is not torch.float64 and self._float is torch.float64
        for matrix, owners in matrices(values):
            norms = narrow(matrix) if plain else wide(matrix, self._float)
            self._add(norms if self._on_host else (*norms, *non_finite(matrix)), owners)

    def compiled(self, values: Owned, compiled: CompiledRows | FusedRows) -> Owned:
        """Measure contiguous tensors of one dtype in a compiled pass; return what that leaves over."""
        plain = [pair for pair in values if pair[1].numel() and is_plain(pair[1])]
        if not plain:
            return values
        measured = compiled.attempt(lambda: compiled.measure([tensor for _, tensor in plain]))
        if measured is None:
            return values
        self._add(measured[0].unbind(1), list(zip([owner for owner, _ in plain], measured[1], strict=True)))
        done = {owner for owner, _ in plain}
        return [pair for pair in values if pair[0] not in done] if len(plain) < len(values) else []

    def count_non_finite(self, values: Owned) -> None:
        """Count NaN and infinity where a norm is not finite: elsewhere there are none.

        Only the host of the memory itself can choose so; on a device both were counted with the rest.
        """
        if not self._on_host or not self._owners:
            return
        suspect_N = ~np.isfinite(torch.cat(self._columns[0]).numpy())
        if not suspect_N.any():
            return
        suspects = set(_owner_of_rows(self._owners)[suspect_N].tolist())
        nothing = torch.zeros(1, dtype=self._float)
        # The counts get rows of their own, behind those that counted nothing.
        for column in self._columns[4:]:
            column.append(torch.zeros(len(suspect_N), dtype=self._float))
        for owner, tensor in values:
            for chunk in chunks(tensor, chunk_size(self._device)[0]) if owner in suspects else ():
                self._add((*[nothing] * 4, *non_finite(chunk.view(1, -1))), [(owner, 1)])

    def append(self, scale: Tensor) -> None:
        """Send a single number of this device with the same copy."""
        self._scale = scale.detach().reshape(1).to(self._float)

    def start_copy(self, transfer: TransferBatch | None = None) -> Transfer:
        """Start the one copy of this device: the columns one after another, then the scale."""
        scale = [] if self._scale is None else [self._scale]
        if self._on_host:
            return HostParts([*itertools.chain.from_iterable(self._columns), *scale])
        columns = (column[0] if len(column) == 1 else torch.cat(column) for column in self._columns if column)
        parts = [column.to(self._float) for column in columns] + scale
        table = torch.cat(parts) if parts else torch.empty(0, dtype=self._float)
        return start_copy(table) if transfer is None else transfer.add(table)

    def decoder(self) -> Callable[[NDArray[np.generic]], _Rows]:
        """Return what decodes the numbers on the host; it keeps no memory of the device alive."""
        owners, scaled = self._owners, self._scale is not None

        def decode(numbers: NDArray[np.generic]) -> _Rows:
            flat = numbers.astype(np.float64, copy=False)
            scale = float(flat[-1]) if scaled else None
            owner = _owner_of_rows(owners)
            table = np.zeros((len(COLUMNS), len(owner)))
            table.reshape(-1)[: len(flat) - scaled] = flat[: len(flat) - scaled]
            return _Rows(owner, table, scale)

        return decode

    def _add(self, columns: Sequence[Tensor], owners: list[tuple[int, int]]) -> None:
        # Four columns where non-finite values are counted later, six where they are counted with the rest.
        for column, values_R in zip(self._columns, columns, strict=False):
            column.append(values_R)
        self._owners += owners


def _owner_of_rows(owners: list[tuple[int, int]]) -> NDArray[np.int64]:
    owner, rows = np.array(owners, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(owner, rows)


def _join(shares_P2: NDArray[np.int64], parts: list[_Rows], divisor: float) -> Arrays:
    """Join the rows of all devices to numbers per tensor."""
    times_P, numel_P = shares_P2.T
    size = len(times_P)
    owner = np.concatenate([np.empty(0, dtype=np.int64), *[part.owner for part in parts]])
    norm, top, total, nonzero, nan, inf = np.concatenate(
        [np.empty((len(COLUMNS), 0)), *[part.numbers for part in parts]], axis=1
    )
    for part in parts:
        divisor = divisor if part.scale is None else part.scale
    nonzero_P, nan_P, inf_P = [
        np.bincount(owner, column, size).astype(np.int64) for column in (nonzero, nan, inf)
    ]
    counts = np.stack(
        (
            times_P > 0,
            numel_P,
            numel_P - times_P * nonzero_P,
            times_P * nan_P,
            times_P * inf_P,
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
        # Next to an infinity a norm may miss a NaN; no number may depend on how the tensor was cut.
        values[counts[:, 3] > 0, :2] = np.nan
        values /= divisor
    values[times_P == 0] = 0.0
    return values, counts
