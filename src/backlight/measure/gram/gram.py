"""Exact Grams ``K_nm = <g_n, g_m>`` of one parameter's per-sample gradients, from its factors.

The ghost kernel multiplies inputs with inputs and deltas with deltas, ``K = sum_ts (x_nt . x_ms)(d_nt .
d_ms)``, and never forms a gradient: N^2 T^2 (i + o). The chunked kernel forms some rows of all per-sample
gradients at a time, ``G_c``, and adds ``G_c G_c^T``: N T i o + N^2 i o. Products are summed in float64,
since a Gram squares the condition number; gradients that were formed in float32 are multiplied in float32 on
a CPU, in runs so short that the second rounding changes eigenvalues less than the first. docs/formulas.md,
section 3.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from backlight import devices
from backlight.measure.gram.factors import (
    Factors,
    LookupFactors,
    MatrixFactors,
    VectorFactors,
    common_shape,
    device_of,
    working_dtype,
)
from backlight.measure.stats.kernels import Scratch, promoted

SCRATCH_BYTES = 4 << 20
"""Bytes of per-sample gradients, and of products of positions, that are there at once: what a cache holds."""

_BUFFERS = Scratch()
"""Buffers that measurements of a thread share: fresh memory costs more than what is done with it."""

RUN = 64
"""Most products that are added up in float32 before their sum goes on in float64."""

_SUMS = 1 << 16
"""Sums of runs that are there at once: what stays in a cache until they are added up."""


def gram(
    uses: Sequence[Factors],
    *,
    kernel: str = "auto",
    scratch: int = SCRATCH_BYTES,
    products: torch.dtype | None = None,
) -> tuple[Tensor, str, torch.dtype]:
    """Return the Gram of the per-sample gradients of one parameter, float64 ``[N, N]``, and the kernel used.

    ``uses`` are the factors of each use of the parameter. ``kernel`` is ``"ghost"``, ``"chunked"``, or
    ``"auto"`` for what :func:`choose` expects to be fastest; ``"vectors"`` may be used. ``scratch`` are bytes
    of memory. ``products`` is the type of products, None for that of the choice; in float32 eigenvalues below
    about 1e-7 of the largest are lost. The type is returned as well.
    """
    with torch.no_grad(), _no_autocast(uses[0]):
        uses = renumbered(uses)
        common_shape(uses)
        if all(isinstance(use, VectorFactors) and use.rows == 1 for use in uses):
            total = uses[0].values if len(uses) == 1 else sum(use.values for use in uses)  # type: ignore[union-attr, misc]
            values = promoted(total).double()  # type: ignore[arg-type]
            n = len(values)
            if n <= 64:
                return values @ values.T, "vectors", torch.float64
            K = values.new_zeros(n, n)
            for a, b in _triangle(n, 1, scratch):
                _fill(K, values[a:b] @ values[a:].T, a, b)
            return K, "vectors", torch.float64
        chosen, kind = choose(uses, products) if kernel == "auto" else (kernel, products)
        if chosen == "ghost" and can_concatenate(uses):
            kind = kind or torch.float64
            return ghost(uses, scratch, kind), "ghost", kind
        kind = kind or product_dtype(uses)
        return chunked(uses, scratch, kind), "chunked", kind


def product_dtype(uses: Sequence[Factors]) -> torch.dtype:
    """Return the type of products: on a CPU that of the gradients; elsewhere float32 could mean TF32."""
    return working_dtype(uses) if device_of(uses[0]).type == "cpu" else torch.float64


def _no_autocast(use: Factors) -> contextlib.AbstractContextManager[object]:
    kind = device_of(use).type
    enabled = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if enabled else contextlib.nullcontext()


def renumbered(uses: Sequence[Factors]) -> Sequence[Factors]:
    """Return lookups renumbered to the rows that any of them reads; other factors unchanged."""
    lookups = [use for use in uses if isinstance(use, LookupFactors)]
    if len(lookups) < len(uses):
        return uses
    ids = torch.cat([use.ids.reshape(-1) for use in lookups])
    read, renumbered = torch.unique(ids, return_inverse=True)
    parts = renumbered.split([use.ids.numel() for use in lookups])
    return [
        LookupFactors(part.view(use.ids.shape), use.delta, read.numel())
        for use, part in zip(lookups, parts, strict=True)
    ]


def choose(uses: Sequence[Factors], products: torch.dtype | None = None) -> tuple[str, torch.dtype]:
    """Return the kernel that the cost rule expects to be faster, ``"ghost"`` or ``"chunked"``, and its type.

    Ghost iff ``c T^2 N^2 (i + o) < N T i o + N^2 i o``, T over all uses and c measured here. Without
    ``products``, ghost products are in float64 where that is faster than to form gradients; else they are in
    the type of gradients that are formed (:func:`product_dtype`) where that is, and these are formed last.
    """
    n, rows, columns = common_shape(uses)
    formed = products or product_dtype(uses)
    if not can_concatenate(uses):
        return "chunked", formed
    kinds = [products] if products else list(dict.fromkeys([torch.float64, formed]))
    positions = sum(use.positions for use in uses if not isinstance(use, VectorFactors))
    first = uses[0]
    if isinstance(first, MatrixFactors):
        width = first.groups * columns + rows
        chunk_cost = positions * rows * columns + n * rows * columns
    else:
        width = columns
        chunk_cost = positions * columns + n * rows * columns
    device, dtype = device_of(first), working_dtype(uses)
    for kind in kinds:
        constant = ghost_cost_ratio(device, dtype, kind, formed) if isinstance(first, MatrixFactors) else 1.0
        if constant * n * positions**2 * width < chunk_cost:
            return "ghost", kind
    return "chunked", formed


def can_concatenate(uses: Sequence[Factors]) -> bool:
    """Return whether the uses can be concatenated along T, as the ghost kernel does."""
    kinds = {(type(use), getattr(use, "groups", 1)) for use in uses}
    return len(kinds) == 1 and not isinstance(uses[0], VectorFactors)


@functools.cache
def ghost_cost_ratio(
    device: torch.device, dtype: torch.dtype, products: torch.dtype, formed: torch.dtype
) -> float:
    """Return the time of a ghost product over that of a chunked one of equal count, measured once.

    The median over interleaved pairs: a machine that is busy for a while slows both.
    """
    n, t, i, o = 32, 16, 128, 384
    x = torch.linspace(-1, 1, n * t * i, device=device, dtype=dtype).view(n, t, 1, i)
    d = torch.linspace(1, -1, n * t * o, device=device, dtype=dtype).view(n, t, 1, o)
    uses = [MatrixFactors(d, lambda a, b: x[a:b], lambda: x[..., 0], i, in_memory=True)]
    ghost_time = _clock(lambda: ghost(uses, SCRATCH_BYTES, products), device)
    chunk_time = _clock(lambda: chunked(uses, SCRATCH_BYTES, formed), device)
    ghost_time(), chunk_time()
    ratio = statistics.median(ghost_time() / chunk_time() for _ in range(7))
    counts = n * n * t * t * (i + o), n * t * i * o + n * n * i * o
    return min(8.0, max(0.125, ratio * counts[1] / counts[0]))


def _clock(kernel: Callable[[], Tensor], device: torch.device) -> Callable[[], float]:
    """Return a function that runs the kernel and returns its seconds; of this thread alone on a CPU."""
    now = time.thread_time if device.type == "cpu" else time.perf_counter

    def timed() -> float:
        begin = now()
        kernel()
        devices.synchronize("time of a Gram kernel", device)
        return max(now() - begin, 1e-9)

    return timed


def ghost(uses: Sequence[Factors], scratch: int, products: torch.dtype = torch.float64) -> Tensor:
    """Return the Gram without forming a gradient; every use after the first lies further along T."""
    if isinstance(uses[0], LookupFactors):
        return _ghost_lookup(uses, scratch, products)  # type: ignore[arg-type]
    kind = torch.promote_types(products, working_dtype(uses))
    total = None
    for group in range(uses[0].groups):  # type: ignore[union-attr]
        x = _along_positions("x", [p.all_inputs()[:, :, group] for p in uses], kind)  # type: ignore[union-attr]
        d = _along_positions("d", [p.delta[:, :, group] for p in uses], kind)  # type: ignore[union-attr]
        part = _products(x, d, scratch)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _along_positions(name: str, uses: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    """Return the values of every use concatenated along T, in the given type."""
    if len(uses) > 1:
        return torch.cat([use.to(kind) for use in uses], 1)
    first = uses[0]
    return first if first.dtype == kind else _buffer(name, first.shape, kind, first.device).copy_(first)


def _buffer(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that is valid until the same name asks again; large buffers are not kept."""
    if math.prod(shape) * dtype.itemsize > SCRATCH_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return _BUFFERS.take(name, tuple(shape), dtype, device)


def _times(name: str, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b^T``."""
    return torch.mm(a, b.T, out=_buffer(name, (len(a), len(b)), a.dtype, a.device))


def _products(x_NTi: Tensor, d_NTo: Tensor, scratch: int) -> Tensor:
    n, t = x_NTi.shape[:2]
    x, d = x_NTi.reshape(n * t, -1), d_NTo.reshape(n * t, -1)
    K = x.new_zeros(n, n, dtype=torch.float64)
    for a, b in _triangle(n, t, scratch):
        part = _times("xx", x[a * t : b * t], x[a * t :]).mul_(_times("dd", d[a * t : b * t], d[a * t :]))
        _fill(K, _sum_positions(part, t), a, b)
    return K


def _ghost_lookup(uses: Sequence[LookupFactors], scratch: int, products: torch.dtype) -> Tensor:
    kind = torch.promote_types(products, working_dtype(uses))
    ids = torch.cat([use.ids for use in uses], 1)
    d_NTd = torch.cat([promoted(use.delta).to(kind) for use in uses], 1)
    n, t = ids.shape
    d, flat = d_NTd.reshape(n * t, -1), ids.reshape(-1)
    K = d.new_zeros(n, n, dtype=torch.float64)
    for a, b in _triangle(n, t, scratch):
        part = _times("dd", d[a * t : b * t], d[a * t :]).mul_(
            flat[a * t : b * t, None] == flat[None, a * t :]
        )
        _fill(K, _sum_positions(part, t), a, b)
    return K


def _sum_positions(part: Tensor, t: int) -> Tensor:
    """Sum products of positions ``[n t, m t]`` to products of samples ``[n, m]``, in float64."""
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


def chunked(uses: Sequence[Factors], scratch: int, products: torch.dtype = torch.float64) -> Tensor:
    """Return the Gram from some rows of all per-sample gradients at a time."""
    uses = _transposed(uses)
    n, _, _ = common_shape(uses)
    kind = torch.promote_types(products, working_dtype(uses))
    split = n >= (32 if kind == torch.float64 else 64)  # K is symmetric: a quarter need not be computed
    half = n // 2
    K: Tensor | None = None
    buffer: Tensor | None = None
    for _, _, G in chunks(uses, scratch, kind):
        G_Nm = G.view(n, -1)
        if G_Nm.dtype != kind:
            if buffer is None:
                buffer = _buffer("wide", G_Nm.shape, kind, G_Nm.device)
            G_Nm = buffer.view(-1)[: G_Nm.numel()].view(G_Nm.shape).copy_(G_Nm)
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


def _transposed(uses: Sequence[Factors]) -> Sequence[Factors]:
    """Return products of wide matrices transposed: long chunks of short rows are formed faster."""
    transposed = [use.transposed() for use in uses if isinstance(use, MatrixFactors)]
    whole = [use for use in transposed if use is not None and use.rows > use.columns]
    return whole if len(whole) == len(uses) else uses


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
    uses: Sequence[Factors], scratch: int = SCRATCH_BYTES, products: torch.dtype = torch.float64
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ``start, stop, G``, rows ``start`` to ``stop`` of every sample's gradient ``[N, rows, C]``.

    G is valid until the next one is asked for. It holds enough rows to justify reading the inputs once more,
    and leaves space within ``scratch`` for a copy in the type of the products.
    """
    n, rows, columns = common_shape(uses)
    dtype = working_dtype(uses)
    size = dtype.itemsize + (products.itemsize if dtype != products else 0)
    step = scratch // (size * n * columns)
    width = rows
    for use in uses:
        if isinstance(use, MatrixFactors):
            width = min(width, use.delta.shape[3])
            step = max(step, use.reread if use.positions > 1 and scratch >= SCRATCH_BYTES else 1)
    step = max(1, min(rows, step))
    step = step // width * width if step >= width else step
    buffer = _buffer("rows", (n * step * columns,), dtype, device_of(uses[0]))
    start = 0
    while start < rows:
        stop = min(rows, start + step)
        if step < width:  # not over the end of a group
            stop = min(stop, (start // width + 1) * width)
        G = buffer[: n * (stop - start) * columns].view(n, stop - start, columns)
        for number, use in enumerate(uses):
            use.take(start, stop, G, add=number > 0)
        yield start, stop, G
        start = stop


def combine(uses: Sequence[Factors], weights_kN: Tensor, *, scratch: int = SCRATCH_BYTES) -> Tensor:
    """Return ``sum_n weights[k, n] g_n``, ``[k, rows, columns]`` in float64, in one pass."""
    with torch.no_grad(), _no_autocast(uses[0]):
        n, rows, columns = common_shape(uses)
        out = weights_kN.new_zeros(weights_kN.shape[0], rows, columns)
        for start, stop, G in chunks(uses, scratch):
            out[:, start:stop] = (weights_kN @ G.view(n, -1).double()).view(-1, stop - start, columns)
        return out
