"""Replicates of one gradient, in chunks that fit into memory, and how much of them is signal or noise.

R replicates of shape p x q, ``G_a = G + E_a``, C of them in a chunk: data-parallel workers times accumulation
steps, taken before any reduction, with batches of one size and disjoint data. They may be on the host while a
device works: then the next chunk is copied on a side stream. Half precision becomes float32 before anything
is computed; sums are taken in float64. docs/formulas.md, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from backlight import devices
from backlight.measure.noise_scale import Interval, noise_scale
from backlight.measure.spectra.shrinkage import bulk_edge
from backlight.measure.stats.kernels import promoted

BUDGET_BYTES = 256 * 2**20
"""Bytes that a chunk of replicates and what is computed from it may take, by default."""

# Numbers of a sum that fit into a core's cache, and bytes beyond which a CPU gains nothing by a batch.
_PIECE_SCALARS = 2**16
_CACHE_BYTES = 32 * 2**20

# Replicates closer to each other than this share of the distance that noise makes are one and the same.
_SAME = 1e-4

# Below this share of noise the difference of two sums of squares has lost too many digits.
_CANCELS = 1e-5


class ReplicateError(ValueError):
    """Replicates that cannot be measured; the message names the layer and, where possible, the replicate."""


def as_matrix(tensor: Tensor, *, layer: str = "") -> Tensor:
    """Return a tensor as a matrix, convolutions as outputs x everything else; ReplicateError for vectors."""
    if tensor.ndim < 2:
        raise ReplicateError(
            f"{named(layer)}: has shape {tuple(tensor.shape)}; singular directions need a matrix. "
            f"Leave out parameters with fewer than two dimensions."
        )
    return tensor if tensor.ndim == 2 else tensor.reshape(tensor.shape[0], -1)


def named(layer: str) -> str:
    """Return the name of a layer in messages."""
    return f"layer {layer!r}" if layer else "the layer"


def sum_squares(x_pq: Tensor) -> float:
    """Return the sum of squares of a matrix in float64; NaN or infinite where it holds such values."""
    if x_pq.device.type != "cpu":
        dtype = devices.widest_float(x_pq.device)
        return float(torch.linalg.vector_norm(x_pq, dtype=dtype)) ** 2
    # Eight times faster than a norm in float64, which converts number by number.
    sums = []
    scratch = torch.empty(0, dtype=torch.float64)
    for axis, begin, length in _pieces(x_pq):
        piece = x_pq.narrow(axis, begin, length)
        scratch.resize_(piece.shape).copy_(piece)
        flat = scratch.view(-1)
        sums.append(torch.dot(flat, flat))
    return float(torch.stack(sums).sum())


def _pieces(x_pq: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield axis, begin and length of slices of a matrix that fit into a core's cache."""
    axis = 0 if x_pq.stride(0) >= x_pq.stride(1) else 1
    size = max(1, _PIECE_SCALARS * x_pq.shape[axis] // x_pq.numel())
    for begin in range(0, x_pq.shape[axis], size):
        yield axis, begin, min(size, x_pq.shape[axis] - begin)


@dataclass(frozen=True)
class Replicates:
    """R replicates of a p x q gradient."""

    matrices: tuple[Tensor, ...]  # R tensors [p, q] of one type
    layer: str  # name in messages
    device: torch.device  # where the work is done
    budget: int  # bytes that a chunk may take on that device
    squares: tuple[float, ...]  # sum of squares of each replicate, float64
    order: tuple[int, ...]  # ascending by squares: sums in this order do not depend on the given one
    _loader: _Loader = field(repr=False, compare=False)

    @classmethod
    def of(
        cls,
        G: Tensor | Sequence[Tensor],
        *,
        layer: str = "",
        least: int = 2,
        device: torch.device | str | None = None,
        budget: int = BUDGET_BYTES,
    ) -> Replicates:
        """Check at least ``least`` replicates, ``[R, p, q]`` or R tensors ``[p, q]``; else ReplicateError."""
        matrices = _checked_matrices(G, layer, least)
        where = torch.device(device) if device is not None else matrices[0].device
        loader = _Loader(matrices, where)
        squares = []
        for a, x in loader.each():
            square = sum_squares(x)
            if not math.isfinite(square):
                raise ReplicateError(
                    f"{named(layer)}: replicate {a} holds NaN or infinite values. "
                    f"Leave that replicate out, or find their origin with `backlight nan`."
                )
            squares.append(square)
        if not any(squares):
            raise ReplicateError(
                f"{named(layer)}: all {len(matrices)} replicates are zero; zero has no directions."
            )
        order = tuple(sorted(range(len(matrices)), key=squares.__getitem__))
        return cls(matrices, layer, where, budget, tuple(squares), order, loader)

    def __len__(self) -> int:
        return len(self.matrices)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape p, q of one replicate."""
        p, q = self.matrices[0].shape
        return p, q

    def wide(self) -> Replicates:
        """Return views of these replicates with the short side first."""
        p, q = self.shape
        if p <= q:
            return self
        matrices = tuple(matrix.mT for matrix in self.matrices)
        return replace(self, matrices=matrices, _loader=_Loader(matrices, self.device))

    def refuse_zero(self) -> None:
        """Raise ReplicateError for a replicate that is zero, which has no directions."""
        for a, square in enumerate(self.squares):
            if square == 0:
                raise ReplicateError(
                    f"{named(self.layer)}: replicate {a} is zero and has no directions; was the layer used "
                    f"in that batch? Leave that replicate out."
                )

    def at(self, a: int) -> Tensor:
        """Return replicate ``a``, promoted, on the device."""
        return promoted(self.matrices[a].to(self.device))

    def mean(self) -> Tensor:
        """Return the mean ``[p, q]`` in float64 on the device."""
        dtype = devices.widest_float(self.device)
        total = torch.zeros(self.shape, dtype=dtype, device=self.device)
        if any(matrix.device != self.device for matrix in self.matrices):
            for _, x in self._loader.each(self.order):
                total += x
            return total / len(self)
        # Piece by piece over all replicates: a piece of the sum stays in the cache meanwhile.
        for axis, begin, length in _pieces(self.matrices[0]):
            piece = total.narrow(axis, begin, length)
            for a in self.order:
                piece.add_(self.matrices[a].narrow(axis, begin, length))
        return total / len(self)

    def chunks(self, work: Callable[[tuple[int, ...], Tensor], None], *, bytes_each: int) -> int:
        """Call ``work(indices, x_Cpq)`` on all replicates in :attr:`order`; return how many fit at once."""
        # Where memory does not suffice the chunk is halved for good: failed work must leave nothing behind.
        budget = min(self.budget, _CACHE_BYTES) if self.device.type == "cpu" else self.budget
        size = max(1, min(len(self), budget // max(bytes_each, 1)))
        begin = 0
        while begin < len(self):
            indices = self.order[begin : begin + size]
            ahead = self.order[begin + size : begin + 2 * size]
            try:
                work(indices, self._loader.load(indices, ahead))
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                if len(indices) == 1:
                    raise ReplicateError(
                        f"{named(self.layer)}: out of memory on {self.device} with a single replicate of "
                        f"{' x '.join(map(str, self.shape))} (replicate {indices[0]}). Measure this layer on "
                        "another device."
                    ) from error
                size = max(1, len(indices) // 2)
                self._loader.forget()
                continue
            begin += len(indices)
        return size


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory did not suffice, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # What the allocator of the host raises has no type of its own.
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


@dataclass(frozen=True)
class Noise:
    """Signal and noise of one gradient."""

    replicates: int  # R
    shape: tuple[int, int]  # p, q
    variance: float  # of one entry: sum_a |G_a - mean|^2 / ((R - 1) p q)
    mean_square: float  # T, mean over the replicates of their sum of squares
    signal_share: float  # rho = (R |mean|^2 - T) / ((R - 1) T); may be below 0 without signal
    squares: tuple[float, ...] = ()  # R squared norms
    products: tuple[float, ...] = ()  # R inner products with the sum of all

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise of one entry, in the unit of the gradient."""
        return math.sqrt(self.variance)

    @property
    def edge(self) -> float:
        """Bulk edge ``sigma (sqrt p + sqrt q)``: the largest singular value of the noise."""
        return bulk_edge(self.sigma, *self.shape)

    def noise_scale(self, batch: float) -> float:
        """Return the simple noise scale ``B (1 - rho) / rho``, in the unit of ``batch``, that of a replicate.

        The batch at which noise and signal have the same squared norm, which is the critical batch size
        under the assumptions of McCandlish et al., arXiv:1812.06162, section 2.2. Infinite where no signal
        was found (rho not above 0).

        Raises
        ------
        ValueError
            If ``batch`` is not positive.
        """
        if not batch > 0:
            raise ValueError(f"the batch size of a replicate must be positive, got {batch!r}")
        if self.signal_share <= 0:
            return math.inf
        return max(0.0, batch * (1 - self.signal_share) / self.signal_share)

    def noise_scale_interval(self, batch: float) -> Interval:
        """Return the 95 % interval of :meth:`noise_scale`, a jackknife over the replicates."""
        return noise_scale(self.squares, self.products, batch).interval

    def share_at(self, replicates: int) -> float:
        """Return the signal share of the mean of so many replicates, ``1 / (1 + (1/rho - 1)/n)``."""
        rho = self.signal_share
        return rho * replicates / (1 + rho * (replicates - 1)) if rho > 0 else 0.0


def noise_about(replicates: Replicates, mean: Tensor) -> Noise:
    """Measure signal and noise of replicates whose mean ``[p, q]`` is known."""
    count, (p, q) = len(replicates), replicates.shape
    square_of_mean = sum_squares(mean)
    total = math.fsum(replicates.squares)
    mean_square = total / count
    deviation = total - count * square_of_mean
    if deviation < _CANCELS * total:
        deviation = math.fsum(sum_squares(replicates.at(a).to(mean.dtype) - mean) for a in replicates.order)
    variance = deviation / ((count - 1) * p * q)
    # R |mean|^2 - T = (R - 1) T - sum |G_a - mean|^2: exact where all replicates agree.
    share = 1 - deviation / ((count - 1) * mean_square)
    products = tuple(count * _product(replicates.at(a), mean) for a in range(count))
    return Noise(count, (p, q), variance, mean_square, share, replicates.squares, products)


def _product(x_pq: Tensor, y_pq: Tensor) -> float:
    """Return the inner product of two matrices, in the type of the second one, piece by piece."""
    sums = []
    for axis, begin, length in _pieces(x_pq):
        x, y = x_pq.narrow(axis, begin, length), y_pq.narrow(axis, begin, length)
        sums.append(x.to(y.dtype).mul_(y).sum() if x.dtype != y.dtype else (x * y).sum())
    return float(torch.stack(sums).sum())


def check_distinct(replicates: Replicates, sigma2: float) -> None:
    """Raise ReplicateError for replicates of the same data, whose echo means nothing."""
    # Closer than 1e-4 of the 2 sigma^2 p q that noise puts between two of them. Only neighbours in norm are
    # compared.
    p, q = replicates.shape
    expected = 2 * sigma2 * p * q
    for a, b in zip(replicates.order, replicates.order[1:], strict=False):
        first, other = replicates.squares[a], replicates.squares[b]
        # |‖x‖ - ‖y‖| <= ‖x - y‖: most pairs differ in their norms.
        if (math.sqrt(other) - math.sqrt(first)) ** 2 > _SAME * expected:
            continue
        if not _is_close(replicates.matrices[a], replicates.matrices[b], expected / (p * q)):
            continue
        x, y = (promoted(replicates.matrices[i]).to(replicates.device) for i in (a, b))
        if sum_squares(x - y) <= _SAME * expected:
            raise ReplicateError(
                f"{named(replicates.layer)}: replicates {min(a, b)} and {max(a, b)} are the same, as if "
                f"both came from the same data. Give each rank and microbatch data of its own."
            )


def _is_close(first: Tensor, other: Tensor, expected: float) -> bool:
    """Return whether a sample of two replicates is far closer than noise puts them, as for few pairs."""
    rows = slice(None, None, max(1, first.shape[0] // 32))
    columns = slice(None, None, max(1, first.shape[1] // 32))
    difference = promoted(first[rows, columns]) - promoted(other[rows, columns])
    return float(difference.double().square().mean()) <= 0.1 * expected


def _checked_matrices(G: Tensor | Sequence[Tensor], layer: str, least: int) -> tuple[Tensor, ...]:
    if isinstance(G, Tensor) and G.ndim != 3:
        raise ReplicateError(
            f"{named(layer)}: expected replicates [R, p, q], got shape {tuple(G.shape)}. "
            f"Parameters with one dimension have no singular directions; reshape convolutions."
        )
    matrices = tuple(matrix.detach() for matrix in G)
    if len(matrices) < least:
        raise ReplicateError(
            f"{named(layer)}: {len(matrices)} replicate(s), at least {least} are needed. "
            f"Use more microbatches or more ranks."
        )
    first = matrices[0]
    for a, matrix in enumerate(matrices):
        if matrix.ndim != 2 or not matrix.numel():
            raise ReplicateError(
                f"{named(layer)}: replicate {a} has shape {tuple(matrix.shape)}; expected a matrix."
            )
        if matrix.shape != first.shape or matrix.dtype != first.dtype:
            raise ReplicateError(
                f"{named(layer)}: replicate {a} is {matrix.dtype} {tuple(matrix.shape)}, "
                f"replicate 0 is {first.dtype} {tuple(first.shape)}; they must have one type and shape."
            )
    if not first.dtype.is_floating_point:
        raise ReplicateError(f"{named(layer)}: replicates are {first.dtype}; expected real floating values.")
    return matrices


class _Loader:
    """Loads replicates to the device; from the host to an accelerator on a side stream, one chunk ahead."""

    def __init__(self, matrices: tuple[Tensor, ...], device: torch.device) -> None:
        self._matrices = matrices
        self._device = device
        needs_copy = devices.has_async_copies(device) and matrices[0].device.type == "cpu"
        self._stream = devices.side_stream(device) if needs_copy else None
        self._ahead: dict[tuple[int, ...], Tensor] = {}

    def each(self, order: Sequence[int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield index and promoted replicate, one by one."""
        indices = range(len(self._matrices)) if order is None else order
        for position, a in enumerate(indices):
            if self._stream is None:
                yield a, promoted(self._matrices[a].to(self._device))
            else:
                yield a, self.load((a,), tuple(indices[position + 1 : position + 2]))[0]

    def load(self, indices: tuple[int, ...], ahead: tuple[int, ...]) -> Tensor:
        """Return promoted ``[C, p, q]``, and start the copy of the next ones."""
        if self._stream is None:
            return promoted(torch.stack([self._matrices[a].to(self._device) for a in indices]))
        moved = self._ahead.pop(indices, None)
        if moved is None:
            moved = self._send(indices)
        here = devices.current_stream(self._device)
        here.wait_stream(self._stream)
        moved.record_stream(here)  # its memory must not be reused while this stream still reads it
        self.forget()
        if ahead:
            self._ahead[ahead] = self._send(ahead)
        return promoted(moved)

    def forget(self) -> None:
        """Drop what was copied ahead."""
        self._ahead.clear()

    def _send(self, indices: tuple[int, ...]) -> Tensor:
        staged = torch.stack([self._matrices[a] for a in indices]).pin_memory()
        with devices.on_stream(self._stream):
            return staged.to(self._device, non_blocking=True)
