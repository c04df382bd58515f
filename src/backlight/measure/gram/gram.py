"""Exact Grams ``K_nm = <g_n, g_m>`` of one parameter's per-sample gradients, from its pieces.

The ghost kernel multiplies inputs with inputs and deltas with deltas, ``K = sum_ts (x_nt . x_ms)(d_nt .
d_ms)``, and never forms a gradient: N^2 T^2 (i + o). The chunked kernel forms some rows of all per-sample
gradients at a time, ``G_c``, and adds ``G_c G_c^T``: N T i o + N^2 i o. Products are summed in float64, since
a Gram squares the condition number; gradients that were formed in float32 are multiplied in it on a
processor, in runs so short that rounding them again changes eigenvalues less than it did the first time.

Source: docs/formulas.md, section 3.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from backlight.measure.gram.factors import (
    BLOCK,
    Factors,
    Lookup,
    Piece,
    Vectors,
    layout,
    wide,
    working_dtype,
)
from backlight.measure.stats.kernels import Scratch

SCRATCH = 4 << 20
"""Bytes of per-sample gradients, and of products of positions, that are there at once: what a cache holds."""

_KEPT = Scratch()
"""Buffers that measurements of a thread share: fresh memory costs more than what is done with it."""

RUN = 64
"""Most products that are added up in float32 before their sum goes on in float64."""

_SUMS = 1 << 16
"""Sums of runs that are there at once: what stays in a cache until they are added up."""


def gram(
    pieces: Sequence[Piece],
    *,
    kernel: str = "auto",
    scratch: int = SCRATCH,
    products: torch.dtype | None = None,
) -> tuple[Tensor, str]:
    """Return the Gram of the per-sample gradients of one parameter, and the kernel that gave it.

    Parameters
    ----------
    pieces
        One piece for each use of the parameter.
    kernel
        ``"ghost"``, ``"chunked"``, or ``"auto"`` for the one that the cost rule expects to be faster.
    scratch
        Bytes that may be at work at once.
    products
        The type in which gradients are multiplied; None for float64, and on a processor that in which they
        were formed, where they were. In float32, runs of at most :data:`RUN` products are added up in
        float32 and the runs in float64; eigenvalues below about 1e-7 of the largest are lost.

    Returns
    -------
    tuple
        float64 ``[N, N]`` on the device of the pieces, and ``"ghost"``, ``"chunked"`` or ``"vectors"``.

    Raises
    ------
    ValueError
        If the pieces do not fit together.
    """
    with torch.no_grad(), _no_autocast(pieces[0]):
        pieces = compact(pieces)
        layout(pieces)
        if all(isinstance(piece, Vectors) and piece.rows == 1 for piece in pieces):
            total = pieces[0].values if len(pieces) == 1 else sum(piece.values for piece in pieces)  # type: ignore[union-attr, misc]
            values = wide(total).double()  # type: ignore[arg-type]
            n = len(values)
            if n <= 64:
                return values @ values.T, "vectors"
            K = values.new_zeros(n, n)
            for a, b in _triangle(n, 1, scratch):
                _fill(K, values[a:b] @ values[a:].T, a, b)
            return K, "vectors"
        chosen = kernel if kernel != "auto" else choose(pieces, products)
        if chosen == "ghost" and alike(pieces):
            return ghost(pieces, scratch, products or torch.float64), "ghost"
        return chunked(pieces, scratch, products or formed(pieces)), "chunked"


def formed(pieces: Sequence[Piece]) -> torch.dtype:
    """Return the type in which gradients of ``pieces`` are multiplied where nothing else is asked for.

    That in which they are formed on a processor; elsewhere float32 products may be those of TF32.
    """
    return working_dtype(pieces) if _device(pieces[0]).type == "cpu" else torch.float64


def _device(piece: Piece) -> torch.device:
    return piece.values.device if isinstance(piece, Vectors) else piece.delta.device


def _no_autocast(piece: Piece) -> torch.autocast:
    return torch.autocast(_device(piece).type, enabled=False)


def compact(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return lookups renumbered to the rows that any of them reads; other pieces as they are."""
    lookups = [piece for piece in pieces if isinstance(piece, Lookup)]
    if len(lookups) < len(pieces):
        return pieces
    ids = torch.cat([piece.ids.reshape(-1) for piece in lookups])
    read, renumbered = torch.unique(ids, return_inverse=True)
    parts = renumbered.split([piece.ids.numel() for piece in lookups])
    return [
        Lookup(part.view(piece.ids.shape), piece.delta, read.numel())
        for piece, part in zip(lookups, parts, strict=True)
    ]


def choose(pieces: Sequence[Piece], products: torch.dtype | None = None) -> str:
    """Return ``"ghost"`` or ``"chunked"``: what the cost rule expects to be faster.

    Ghost iff ``c T^2 N^2 (i + o) < N T i o + N^2 i o`` with T over all uses, and c the measured cost of a
    ghost product relative to a chunked one on this device and type.
    """
    n, rows, columns = layout(pieces)
    if not alike(pieces):
        return "chunked"
    positions = sum(piece.positions for piece in pieces if not isinstance(piece, Vectors))
    if isinstance(pieces[0], Factors):
        width = pieces[0].groups * columns + rows
        chunk_cost = positions * rows * columns + n * rows * columns
        constant = ghost_constant(pieces[0].delta.device, working_dtype(pieces), products)
    else:
        width = columns
        chunk_cost = positions * columns + n * rows * columns
        constant = 1.0
    return "ghost" if constant * n * positions**2 * width < chunk_cost else "chunked"


def alike(pieces: Sequence[Piece]) -> bool:
    """Whether the pieces can be laid one after the other along T, as the ghost kernel does."""
    kinds = {(type(piece), getattr(piece, "groups", 1)) for piece in pieces}
    return len(kinds) == 1 and not isinstance(pieces[0], Vectors)


@functools.cache
def ghost_constant(device: torch.device, dtype: torch.dtype, products: torch.dtype | None = None) -> float:
    """Return the time of a ghost product over that of a chunked one of equal count, measured once.

    Both kernels run on a shape where they take about as long; the fastest of six turns counts.
    """
    n, t, i, o = 32, 16, 128, 384
    x = torch.linspace(-1, 1, n * t * i, device=device, dtype=dtype).view(n, t, 1, i)
    d = torch.linspace(1, -1, n * t * o, device=device, dtype=dtype).view(n, t, 1, o)
    pieces = [Factors(d, lambda a, b: x[a:b], lambda: x[..., 0], i)]
    kinds = products or torch.float64, products or formed(pieces)
    ways = (
        lambda: ghost(pieces, SCRATCH, kinds[0]),
        lambda: chunked(pieces, SCRATCH, kinds[1]),
    )
    counts = n * n * t * t * (i + o), n * t * i * o + n * n * i * o
    ghost_time, chunk_time = (
        took / count for took, count in zip(_fastest(ways, device), counts, strict=True)
    )
    return min(8.0, max(0.125, ghost_time / chunk_time))


def _fastest(ways: Sequence[Callable[[], Tensor]], device: torch.device) -> list[float]:
    """Return the least time of each way; they take turns, since a machine may be busy for a while."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(7):
        for way, took in zip(ways, times, strict=True):
            begin = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took.append(time.perf_counter() - begin)
    return [min(took[1:]) for took in times]


def ghost(pieces: Sequence[Piece], scratch: int, products: torch.dtype = torch.float64) -> Tensor:
    """Return the Gram without forming a gradient; every use after the first lies further along T."""
    if isinstance(pieces[0], Lookup):
        return _ghost_lookup(pieces, scratch, products)  # type: ignore[arg-type]
    kind = torch.promote_types(products, working_dtype(pieces))
    total = None
    for group in range(pieces[0].groups):  # type: ignore[union-attr]
        x = _in_line("x", [p.all_inputs()[:, :, group] for p in pieces], kind)  # type: ignore[union-attr]
        d = _in_line("d", [p.delta[:, :, group] for p in pieces], kind)  # type: ignore[union-attr]
        part = _products(x, d, scratch)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _in_line(name: str, uses: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    """Return the values of every use one after the other along T, in that type."""
    if len(uses) > 1:
        return torch.cat([use.to(kind) for use in uses], 1)
    first = uses[0]
    return first if first.dtype == kind else _buffer(name, first.shape, kind, first.device).copy_(first)


def _buffer(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that is valid until the same name asks again; what is large is not kept."""
    if math.prod(shape) * dtype.itemsize > SCRATCH:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return _KEPT.take(name, tuple(shape), dtype, device)


def _times(name: str, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b^T``."""
    return torch.mm(a, b.T, out=_buffer(name, (len(a), len(b)), a.dtype, a.device))


def _products(x_NTi: Tensor, d_NTo: Tensor, scratch: int) -> Tensor:
    n, t = x_NTi.shape[:2]
    x, d = x_NTi.reshape(n * t, -1), d_NTo.reshape(n * t, -1)
    K = x.new_zeros(n, n, dtype=torch.float64)
    for a, b in _triangle(n, t, scratch):
        part = _times("xx", x[a * t : b * t], x[a * t :]).mul_(_times("dd", d[a * t : b * t], d[a * t :]))
        _fill(K, _over_positions(part, t), a, b)
    return K


def _ghost_lookup(pieces: Sequence[Lookup], scratch: int, products: torch.dtype) -> Tensor:
    kind = torch.promote_types(products, working_dtype(pieces))
    ids = torch.cat([piece.ids for piece in pieces], 1)
    d_NTd = torch.cat([wide(piece.delta).to(kind) for piece in pieces], 1)
    n, t = ids.shape
    d, flat = d_NTd.reshape(n * t, -1), ids.reshape(-1)
    K = d.new_zeros(n, n, dtype=torch.float64)
    for a, b in _triangle(n, t, scratch):
        part = _times("dd", d[a * t : b * t], d[a * t :]).mul_(
            flat[a * t : b * t, None] == flat[None, a * t :]
        )
        _fill(K, _over_positions(part, t), a, b)
    return K


def _over_positions(part: Tensor, t: int) -> Tensor:
    """Sum products of positions ``[n t, m t]`` to those of samples ``[n, m]``, in float64."""
    if t == 1:
        return part.double()
    inner = part.view(part.shape[0], -1, t).sum(2, dtype=torch.float64)  # what lies together first
    return inner.view(-1, t, inner.shape[1]).sum(1)


def _triangle(n: int, t: int, scratch: int) -> Iterator[tuple[int, int]]:
    """Yield blocks of samples whose products with all later ones fit into ``scratch``.

    K is symmetric: up to eight blocks, of at least 64 rows each, leave out most of its lower half.
    """
    most = -(-n // min(8, max(1, n * t // 64)))
    a = 0
    while a < n:
        block = max(1, min(most, scratch // (16 * t * t * (n - a))))
        yield a, min(n, a + block)
        a += block


def _fill(K: Tensor, part: Tensor, a: int, b: int) -> None:
    K[a:b, a:] = part
    K[b:, a:b] = part[:, b - a :].T


def chunked(pieces: Sequence[Piece], scratch: int, products: torch.dtype = torch.float64) -> Tensor:
    """Return the Gram from some rows of all per-sample gradients at a time."""
    pieces = _lying(pieces)
    n, _, _ = layout(pieces)
    kind = torch.promote_types(products, working_dtype(pieces))
    split = n >= (32 if kind == torch.float64 else 64)  # K is symmetric: a quarter need not be computed
    half = n // 2
    K: Tensor | None = None
    monitor: Tensor | None = None
    for _, _, G in chunks(pieces, scratch, kind):
        G_Nm = G.view(n, -1)
        if G_Nm.dtype != kind:
            if monitor is None:
                monitor = _buffer("wide", G_Nm.shape, kind, G_Nm.device)
            G_Nm = monitor.view(-1)[: G_Nm.numel()].view(G_Nm.shape).copy_(G_Nm)
        K = G.new_zeros(n, n, dtype=torch.float64) if K is None else K
        if split:
            _add(K[:half], G_Nm[:half], G_Nm)
            _add(K[half:, half:], G_Nm[half:], G_Nm[half:])
        else:
            _add(K, G_Nm, G_Nm)
    assert K is not None
    if split:
        K[half:, :half] = K[:half, half:].T
    return K


def _lying(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return products of wide matrices transposed, as long chunks of short rows are formed faster."""
    turned = [piece.transposed() for piece in pieces if isinstance(piece, Factors)]
    whole = [piece for piece in turned if piece is not None and piece.rows > piece.columns]
    return whole if len(whole) == len(pieces) else pieces


def _add(K: Tensor, A_Nm: Tensor, B_Nm: Tensor) -> None:
    """Add ``A B^T`` to K; in float32, runs of products are summed in float64."""
    if A_Nm.dtype == torch.float64:
        K.addmm_(A_Nm, B_Nm.T)
        return
    whole = A_Nm.shape[1] // RUN * RUN
    a, b = (G[:, :whole].view(len(G), -1, RUN).transpose(0, 1) for G in (A_Nm, B_Nm))
    some = max(1, _SUMS // K.numel())
    for start in range(0, whole // RUN, some):
        left, right = a[start : start + some], b[start : start + some].transpose(1, 2)
        sums = _buffer("sums", (len(left), left.shape[1], right.shape[2]), left.dtype, left.device)
        K += torch.bmm(left, right, out=sums).sum(0, dtype=torch.float64)
    if whole < A_Nm.shape[1]:
        K += A_Nm[:, whole:] @ B_Nm[:, whole:].T


def chunks(
    pieces: Sequence[Piece], scratch: int = SCRATCH, products: torch.dtype = torch.float64
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ``start, stop, G``, rows ``start`` to ``stop`` of every sample's gradient ``[N, rows, C]``.

    G is only valid until the next one is asked for. It holds at least as many rows as make reading the
    inputs once more worthwhile, and leaves room within ``scratch`` for a copy in the type of the products.
    """
    n, rows, columns = layout(pieces)
    dtype = working_dtype(pieces)
    size = dtype.itemsize + (products.itemsize if dtype != products else 0)
    step = scratch // (size * n * columns)
    width = rows
    for piece in pieces:
        if isinstance(piece, Factors):
            width = min(width, piece.delta.shape[3])
            step = max(step, piece.reread if piece.positions > 1 and scratch >= SCRATCH else 1)
    step = max(1, min(rows, step))
    step = step // width * width if step >= width else step
    first = pieces[0]
    if len(pieces) == 1 and isinstance(first, Factors) and first.direct is not None and step == rows:
        yield 0, rows, first.direct()
        return
    monitor = _buffer("rows", (n * step * columns,), dtype, _device(first))
    start = 0
    while start < rows:
        stop = min(rows, start + step)
        if step < width:  # not over the end of a group
            stop = min(stop, (start // width + 1) * width)
        G = monitor[: n * (stop - start) * columns].view(n, stop - start, columns)
        for number, piece in enumerate(pieces):
            piece.take(start, stop, G, add=number > 0)
        yield start, stop, G
        start = stop


def combine(pieces: Sequence[Piece], weights_kN: Tensor, *, scratch: int = SCRATCH) -> Tensor:
    """Return ``sum_n weights[k, n] g_n``, ``[k, rows, columns]`` in float64.

    All k combinations share one walk over the rows of the per-sample gradients, N T i o + k N i o; a
    weighted backward for each would cost k N T i o and a pass through the model each.
    """
    with torch.no_grad(), _no_autocast(pieces[0]):
        n, rows, columns = layout(pieces)
        out = weights_kN.new_zeros(weights_kN.shape[0], rows, columns)
        for start, stop, G in chunks(pieces, scratch):
            out[:, start:stop] = (weights_kN @ G.view(n, -1).double()).view(-1, stop - start, columns)
        return out


__all__ = ["BLOCK", "SCRATCH", "choose", "chunked", "chunks", "combine", "ghost", "ghost_constant", "gram"]
