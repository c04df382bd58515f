"""Singular directions of replicates: how many can be found, and the cheapest accurate way to find them.

C matrices of p x q, p <= q, K directions. The noise level comes first: a direction is *identifiable* if the
singular value that the spiked model expects of it in one replicate exceeds what the largest singular value of
pure noise exceeds in one case of a hundred. Its strength is read off the mean of all replicates, where noise
is weaker. docs/formulas.md, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # torch documents it, and does not export it

from backlight.measure.spectra.randomized_svd import Directions, joined, resolved, singular_values, strongest
from backlight.measure.spectra.replicates import Noise, named
from backlight.measure.spectra.shrinkage import infer, predict, upper_edge

Method = Literal["auto", "svd", "gram", "randomized"]

SMALL_SIDE = 320
"""Up to this D the full decomposition of one matrix costs no more than the overhead of another method."""

TOLERANCE = 0.03
"""Largest residual of a direction over its distance to the next singular value: bounds the sine of its
angle to the true one, and so the error of an overlap."""

OVERSAMPLING = 8
"""Columns of a block beyond the wanted directions."""

WIDTH = 16
"""Most columns of a block: more directions take more blocks, not wider ones."""


class DecompositionError(ArithmeticError):
    """A matrix whose directions did not converge in float64; the message names layer and replicate."""


def decompose(
    A_Cpq: Tensor,
    count: int | None = None,
    *,
    method: Literal["svd", "gram", "randomized"] = "svd",
    edge: float = 0.0,
    wanted: int | None = None,
    start_pb: Tensor | None = None,
    expected: int = 0,
    layer: str = "",
    names: Sequence[str | int] = (),
) -> Directions:
    """Compute the K = ``count`` strongest directions of each of C matrices with p <= q, all p by default.

    ``method`` is ``"svd"`` (LAPACK or cuSOLVER, after a QR reduction where one side is much longer),
    ``"gram"`` (eigenvectors of the product with the transpose, in float64, because float32 loses directions
    below ``sqrt(eps) s_1``) or ``"randomized"`` (see :func:`strongest`, from the weakest columns of
    ``start_pb``). ``layer`` and ``names`` of the matrices are for messages. What does not converge in float32
    is repeated in float64, and finally with the Gram matrix; what fails there raises DecompositionError.

    Raises
    ------
    ValueError
        If ``method`` is unknown.
    """
    C, p, _ = A_Cpq.shape
    count = p if count is None else min(count, p)
    labels = list(names) or list(range(C))
    if method == "randomized":
        searched = strongest(
            A_Cpq,
            count,
            edge=edge,
            wanted=wanted,
            start_pb=None if start_pb is None else start_pb[:, -WIDTH:],
            tolerance=TOLERANCE,
            width=min(count + OVERSAMPLING, WIDTH),
            expected=expected,
        )
        return _again(A_Cpq, searched, count, edge=edge, wanted=wanted, layer=layer, labels=labels)
    if method == "gram":
        return _each(A_Cpq, count, _gram, layer, labels)
    if method == "svd":
        return _each(A_Cpq, count, _svd, layer, labels)
    raise ValueError(f"method must be 'svd', 'gram' or 'randomized', got {method!r}")


def count_above(A_pq: Tensor, edge: float, *, limit: int) -> tuple[int, Directions]:
    """Return the number of singular values above an edge, at most ``limit``, and the directions (C = 1).

    The search is for twice as many until one lies below the edge; it never overestimates a singular value.
    """
    size = min(16, A_pq.shape[0])
    while True:
        strongest_found = strongest(
            A_pq[None], size, edge=edge, tolerance=TOLERANCE, width=min(size + OVERSAMPLING, WIDTH)
        )
        above = int((strongest_found.values[0] > edge).sum())
        if above < size or size >= min(limit, A_pq.shape[0]):
            return min(above, limit), strongest_found
        size = min(2 * size, A_pq.shape[0], max(limit, size))


def _again(
    A_Cpq: Tensor,
    searched: Directions,
    count: int,
    *,
    edge: float,
    wanted: int | None,
    layer: str,
    labels: Sequence[str | int],
) -> Directions:
    """Repeat, in float64, the matrices that did not pass their check."""
    if bool(searched.converged.all()):
        return searched
    parts = [searched.part(c) for c in range(len(A_Cpq))]
    for c in (~searched.converged).nonzero().flatten().tolist():
        repeated = None
        if A_Cpq.dtype == torch.float32 and not _crowded(searched, c, edge, wanted or count):
            repeated = strongest(
                A_Cpq[c : c + 1].double(),
                count,
                edge=edge,
                wanted=wanted,
                width=min(count + OVERSAMPLING, WIDTH),
            )
        if repeated is None or not bool(repeated.converged.all()):
            repeated = _each(A_Cpq[c : c + 1], count, _gram, layer, labels[c : c + 1])
        parts[c] = replace(repeated, left=repeated.left.to(A_Cpq.dtype), right=repeated.right.to(A_Cpq.dtype))
    return replace(joined(parts), columns=searched.columns)


def _crowded(searched: Directions, c: int, edge: float, wanted: int) -> bool:
    """Return whether a search ended far above its working precision, so that more digits would not help."""
    s, missing = searched.values[c : c + 1], searched.residual[c : c + 1]
    open_ = ~(resolved(s, missing, edge, TOLERANCE) | (s <= edge))[0, :wanted]
    return bool((missing[0, :wanted][open_] > 1e-4 * s[0, 0]).any())


def _each(
    A_Cpq: Tensor,
    count: int,
    method: Callable[[Tensor, int], Directions],
    layer: str,
    labels: Sequence[str | int],
) -> Directions:
    """Decompose a batch; on failure one by one, and finally in float64."""
    try:
        return method(A_Cpq, count)
    except LinAlgError:
        pass
    parts = []
    for c, label in enumerate(labels):
        matrix = A_Cpq[c : c + 1]
        try:
            parts.append(_svd(matrix, count))
        except LinAlgError:
            try:
                wide = _svd(matrix.double(), count)
            except LinAlgError as error:
                raise DecompositionError(
                    f"{named(layer)}: the singular value decomposition of replicate {label} "
                    f"({matrix.shape[1]} x {matrix.shape[2]}) did not converge in float64 either: {error}. "
                    f"Leave that replicate out."
                ) from error
            parts.append(replace(wide, left=wide.left.to(matrix.dtype), right=wide.right.to(matrix.dtype)))
    return joined(parts)


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
    # Copies, so that the rest of the factors is freed.
    left, right = left.contiguous(), right.contiguous()
    return _finished(A_Cpq, left, s[:, :count].double(), right)


def _gram(A_Cpq: Tensor, count: int) -> Directions:
    A = A_Cpq.double()
    vectors = torch.linalg.eigh(torch.matmul(A, A.mT))[1]
    left = vectors.flip(-1)[..., :count]
    right = torch.matmul(A.mT, left)
    s = torch.linalg.vector_norm(right, dim=1)
    # Directions of singular value zero have no right side of their own: any completion is as good.
    tiny = s <= 1e-7 * s[:, :1]
    if bool(tiny.any()):
        # Not from the generator of the process, which the watched training script uses.
        generator = torch.Generator().manual_seed(0)
        filler = torch.randn(right.shape, generator=generator, dtype=right.dtype).to(right.device)
        right = torch.linalg.qr(torch.where(tiny[:, None], filler, right))[0]
        signs = torch.sign((torch.matmul(A.mT, left) * right).sum(1))
        right = right * torch.where(signs == 0, 1.0, signs)[:, None]
    else:
        right = right / s[:, None]
    return _finished(A, left, s, right, A_Cpq.dtype)


def _finished(
    A_Cpq: Tensor, left: Tensor, s_CK: Tensor, right: Tensor, dtype: torch.dtype | None = None
) -> Directions:
    away = torch.matmul(A_Cpq, right) - left * s_CK.to(left)[:, None]
    residual = torch.linalg.vector_norm(away, dim=1, dtype=torch.float64)
    dtype = dtype or A_Cpq.dtype
    converged = torch.ones(len(A_Cpq), dtype=torch.bool, device=A_Cpq.device)
    return Directions(left.to(dtype), s_CK, right.to(dtype), residual, converged)


# With more directions than this share of D, searching for them costs as much as computing all.
_SEARCH_SHARE = 1 / 8


@dataclass(frozen=True)
class Plan:
    """Computations for each replicate."""

    method: Literal["svd", "gram", "randomized"]
    identifiable: int  # k, the number of identifiable directions
    directions: int  # K, how many are measured
    candidates: int  # J >= K, how many directions of each replicate are computed
    edge: float  # singular values of one replicate above it are not those of noise
    mean_edge: float  # the same for the mean of all replicates but one
    mean: Directions  # directions of the mean of all replicates, [1, ., >= K]: they number the directions


def plan(
    mean_pq: Tensor,
    pilot_pq: Tensor,
    noise: Noise,
    *,
    method: Method = "auto",
    max_directions: int | None = None,
    layer: str = "",
) -> Plan:
    """Decide what to compute of replicates ``[p, q]``, p <= q, with this mean and noise.

    ``pilot_pq`` is one replicate: real noise may have more large singular values than its model. With
    ``method`` ``"auto"`` small matrices are decomposed fully, larger ones by a search for the identifiable
    directions unless they are many.

    Raises
    ------
    ValueError
        If ``method`` is unknown or ``max_directions`` is not positive.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be 'auto', 'svd', 'gram' or 'randomized', got {method!r}")
    if max_directions is not None and max_directions < 1:
        raise ValueError(f"max_directions must be at least 1, got {max_directions}")
    p, q = mean_pq.shape
    most = p if max_directions is None else min(p, max_directions)
    sigma, count = noise.sigma, noise.replicates
    edge = upper_edge(sigma, p, q)
    mean_edge = upper_edge(sigma / (count - 1) ** 0.5, p, q)
    visible = _visible(noise, p, q)
    if method == "svd" or (method == "auto" and p <= SMALL_SIDE):
        whole = decompose(mean_pq[None], method="svd", layer=layer, names=("of the mean",))
        identifiable = int((whole.values[0] >= visible).sum())
        return Plan("svd", identifiable, most, most, edge, mean_edge, whole)
    limit = p if method != "auto" else max(1, int(p * _SEARCH_SHARE))
    search: Directions | None = None
    identifiable = candidates = p
    if method != "gram":
        identifiable, search = count_above(mean_pq, visible, limit=limit)
        above = count_above(pilot_pq, edge, limit=limit)[0] if identifiable else 0
        candidates = max(identifiable, above) + OVERSAMPLING
    if search is None or (method == "auto" and candidates > limit):
        search = decompose(mean_pq[None], method="gram", layer=layer, names=("of the mean",))
        identifiable = int((search.values[0] >= visible).sum())
        # Structured noise may have more large singular values than directions: each is a candidate.
        above = int((singular_values(pilot_pq, layer=layer) > edge).sum()) if identifiable else 0
        candidates, method = 2 * max(identifiable, above) + OVERSAMPLING, "gram"
    else:
        method = "randomized"
    directions = min(identifiable, most)
    return Plan(method, identifiable, directions, min(p, candidates), edge, mean_edge, search)


def strengths(plan: Plan, noise: Noise, p: int, q: int) -> NDArray[np.float64]:
    """Return the strengths ``[K]`` of the directions of the mean, by the spiked model with its noise."""
    values = plan.mean.values[0, : plan.directions].cpu().numpy()
    return infer(values, noise.sigma / noise.replicates**0.5, p, q).strength


def _visible(noise: Noise, p: int, q: int) -> float:
    """Return the singular value of the mean from which on a direction is identifiable in a replicate."""
    weakest = infer(upper_edge(noise.sigma, p, q), noise.sigma, p, q).strength
    return float(predict(weakest, noise.sigma / noise.replicates**0.5, p, q).value)
