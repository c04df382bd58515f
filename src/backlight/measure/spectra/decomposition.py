"""Singular directions of replicates by the way that costs least and is still right.

C matrices of p x q, D = min(p, q), K directions. The short side is made the left one first, so that
transposing the input exchanges left and right and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # torch documents it, and does not export it

from backlight.measure.spectra.randomized_svd import Directions, resolved, strongest
from backlight.measure.spectra.replicates import named

Method = Literal["auto", "svd", "gram", "randomized"]

SMALL = 320
"""Up to this D the full decomposition of one matrix costs no more than the bookkeeping of another way."""

TOLERANCE = 0.03
"""Largest residual of a direction over its distance to the next singular value: bounds the sine of its
angle to the true one, and so the error of an overlap."""

OVERSAMPLING = 8
"""Columns of a block beyond the directions that are sought."""

WIDTH = 16
"""Columns of a block, at most: more directions take more blocks, not wider ones."""


class DecompositionError(ArithmeticError):
    """A matrix whose directions did not converge, in float64 either; names layer and replicate."""


def decompose(
    A_Cpq: Tensor,
    count: int | None = None,
    *,
    method: Literal["svd", "gram", "randomized"] = "svd",
    edge: float = 0.0,
    wanted: int | None = None,
    start_pb: Tensor | None = None,
    tolerance: float = TOLERANCE,
    expected: int = 0,
    layer: str = "",
    names: Sequence[str | int] = (),
) -> Directions:
    """Compute the strongest directions of each of C matrices.

    Parameters
    ----------
    A_Cpq
        float32 or float64.
    count
        K, all D by default.
    method
        ``"svd"``: LAPACK or cuSOLVER, after a QR reduction where one side is much longer. ``"gram"``:
        eigenvectors of the product with the transpose, always in float64, because one in float32 loses
        directions below ``sqrt(eps) s_1``. ``"randomized"``: block Lanczos from a random start, with a
        residual check.
    edge
        Singular values below it are those of noise: the randomized way need not resolve them.
    wanted
        How many of the K must be resolved; all by default.
    start_pb
        Directions of the short side, strongest first, that the randomized way may begin with: it takes
        the weakest of them, because the others are found at once. They draw what is not resolved towards
        themselves; the error of what is resolved stays within the tolerance.
    tolerance
        See :data:`TOLERANCE`.
    expected
        Columns that the randomized way took for matrices like these.
    layer, names
        What messages call the layer and each of the matrices.

    Returns
    -------
    Directions
        Left and right directions of the matrices as given, in their type. What did not converge in
        float32 was done again in float64, and what did not converge there by the Gram matrix.

    Raises
    ------
    DecompositionError
        If the directions of a matrix do not converge in float64.
    ValueError
        If ``method`` is unknown.
    """
    C, p, q = A_Cpq.shape
    if p > q:
        found = decompose(
            A_Cpq.mT,
            count,
            method=method,
            edge=edge,
            wanted=wanted,
            start_pb=start_pb,
            tolerance=tolerance,
            expected=expected,
            layer=layer,
            names=names,
        )
        return replace(found, left=found.right, right=found.left)
    count = p if count is None else min(count, p)
    labels = list(names) or list(range(C))
    if method == "randomized":
        found = strongest(
            A_Cpq,
            count,
            edge=edge,
            wanted=wanted,
            start_pb=None if start_pb is None else start_pb[:, -WIDTH:],
            tolerance=tolerance,
            width=min(count + OVERSAMPLING, WIDTH),
            expected=expected,
        )
        return _again(A_Cpq, found, count, edge=edge, wanted=wanted, layer=layer, labels=labels)
    if method == "gram":
        return _each(A_Cpq, count, _gram, layer, labels)
    if method == "svd":
        return _each(A_Cpq, count, _svd, layer, labels)
    raise ValueError(f"method must be 'svd', 'gram' or 'randomized', got {method!r}")


def count_above(A_pq: Tensor, edge: float, *, limit: int) -> tuple[int, Directions]:
    """Count the singular values above an edge, with the directions that were found meanwhile.

    The number of directions sought is doubled until one lies below the edge or ``limit`` is passed; what
    the search finds for a singular value is never above it.

    Parameters
    ----------
    A_pq
        float32 or float64, p <= q.
    edge
        What to count from.
    limit
        Number from which on it does not matter how many there are.

    Returns
    -------
    tuple
        The number, at most ``limit``, and the directions (C = 1) that it was counted from.
    """
    size = min(16, A_pq.shape[0])
    while True:
        found = strongest(
            A_pq[None], size, edge=edge, tolerance=TOLERANCE, width=min(size + OVERSAMPLING, WIDTH)
        )
        above = int((found.values[0] > edge).sum())
        if above < size or size >= min(limit, A_pq.shape[0]):
            return min(above, limit), found
        size = min(2 * size, A_pq.shape[0], max(limit, size))


def _again(
    A_Cpq: Tensor,
    found: Directions,
    count: int,
    *,
    edge: float,
    wanted: int | None,
    layer: str,
    labels: Sequence[str | int],
) -> Directions:
    """Do again, in float64, the matrices that did not pass their check."""
    if bool(found.converged.all()):
        return found
    left, values, right = found.left.clone(), found.values.clone(), found.right.clone()
    residual, converged = found.residual.clone(), found.converged.clone()
    for c in (~converged).nonzero().flatten().tolist():
        one = None
        if A_Cpq.dtype == torch.float32 and not _crowded(found, c, edge, wanted or count):
            one = strongest(
                A_Cpq[c : c + 1].double(),
                count,
                edge=edge,
                wanted=wanted,
                width=min(count + OVERSAMPLING, WIDTH),
            )
        if one is None or not bool(one.converged.all()):
            one = _each(A_Cpq[c : c + 1], count, _gram, layer, labels[c : c + 1])
        left[c], values[c], right[c] = one.left[0], one.values[0], one.right[0]
        residual[c], converged[c] = one.residual[0], True
    return Directions(left, values, right, residual, converged, found.columns)


def _crowded(found: Directions, c: int, edge: float, wanted: int) -> bool:
    """Tell whether a search has ended far above its working precision: digits would not have helped."""
    s, missing = found.values[c : c + 1], found.residual[c : c + 1]
    open_ = ~(resolved(s, missing, edge, TOLERANCE) | (s <= edge))[0, :wanted]
    return bool((missing[0, :wanted][open_] > 1e-4 * s[0, 0]).any())


def _each(
    A_Cpq: Tensor,
    count: int,
    way: Callable[[Tensor, int], Directions],
    layer: str,
    labels: Sequence[str | int],
) -> Directions:
    """Decompose a batch; where that fails one by one, and at last in float64.

    Raises
    ------
    DecompositionError
        If that fails too.
    """
    try:
        return way(A_Cpq, count)
    except LinAlgError:
        pass
    parts = []
    for c, label in enumerate(labels):
        one = A_Cpq[c : c + 1]
        try:
            parts.append(_svd(one, count))
        except LinAlgError:
            try:
                wide = _svd(one.double(), count)
            except LinAlgError as error:
                raise DecompositionError(
                    f"{named(layer)}: the singular value decomposition of replicate {label} "
                    f"({one.shape[1]} x {one.shape[2]}) did not converge in float64 either: {error}. "
                    f"Leave that replicate out."
                ) from error
            narrow = (wide.left.to(one.dtype), wide.values, wide.right.to(one.dtype))
            parts.append(Directions(*narrow, wide.residual, wide.converged))
    return Directions(
        torch.cat([part.left for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat([part.right for part in parts]),
        torch.cat([part.residual for part in parts]),
        torch.cat([part.converged for part in parts]),
    )


def _svd(A_Cpq: Tensor, count: int) -> Directions:
    _, p, q = A_Cpq.shape
    if q >= 1.5 * p:
        # A^T = Q R: the decomposition is then of p x p alone.
        Q_Cqp, R_Cpp = torch.linalg.qr(A_Cpq.mT)
        U, s, Wt = torch.linalg.svd(R_Cpp.mT)
        left, right = U[..., :count], torch.matmul(Q_Cqp, Wt.mT[..., :count])
    else:
        U, s, Vt = torch.linalg.svd(A_Cpq, full_matrices=False)
        left, right = U[..., :count], Vt.mT[..., :count]
    # Copies, so that what is not returned is let go.
    left, right = left.contiguous(), right.contiguous()
    return _finished(A_Cpq, left, s[:, :count].double(), right)


def _gram(A_Cpq: Tensor, count: int) -> Directions:
    A = A_Cpq.double()
    values, vectors = torch.linalg.eigh(torch.matmul(A, A.mT))
    left = vectors.flip(-1)[..., :count]
    right = torch.matmul(A.mT, left)
    s = torch.linalg.vector_norm(right, dim=1)
    # Directions of singular value zero have no right side of their own: any completion is as good.
    tiny = s <= 1e-7 * s[:, :1]
    if bool(tiny.any()):
        # Not from the generator of the process: a training that is watched draws from it.
        generator = torch.Generator().manual_seed(0)
        filler = torch.randn(right.shape, generator=generator, dtype=right.dtype).to(right.device)
        right = torch.linalg.qr(torch.where(tiny[:, None], filler, right))[0]
        signs = torch.sign((torch.matmul(A.mT, left) * right).sum(1))
        right = right * torch.where(signs == 0, 1.0, signs)[:, None]
    else:
        right = right / s[:, None]
    del values
    return _finished(A, left, s, right, A_Cpq.dtype)


def _finished(
    A_Cpq: Tensor, left: Tensor, s_CK: Tensor, right: Tensor, dtype: torch.dtype | None = None
) -> Directions:
    away = torch.matmul(A_Cpq, right) - left * s_CK.to(left)[:, None]
    residual = torch.linalg.vector_norm(away, dim=1, dtype=torch.float64)
    dtype = dtype or A_Cpq.dtype
    converged = torch.ones(len(A_Cpq), dtype=torch.bool, device=A_Cpq.device)
    return Directions(left.to(dtype), s_CK, right.to(dtype), residual, converged)
