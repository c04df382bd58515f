"""Which singular directions of a gradient would be found again with other data: the whole measurement.

R replicates of a p x q gradient, D = min(p, q), K <= D directions measured. Directions are numbered by the
mean of all replicates, strongest first; the directions of a replicate are aligned with the mean of the
*others*, because a reference that contains the replicate is biased towards it. What was not measured is NaN,
never 0. docs/formulas.md, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.measure.spectra import echo as estimate
from backlight.measure.spectra.decomposition import Method, Plan, decompose, plan, strengths
from backlight.measure.spectra.echo import CONFIDENCE, Matching, Null, align, overlaps
from backlight.measure.spectra.randomized_svd import Directions, stable_rank
from backlight.measure.spectra.replicates import BUDGET_BYTES, Noise, Replicates, check_distinct, noise_about
from backlight.measure.spectra.shrinkage import clusters, infer, predict

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class SpectralEcho:
    """Result of :func:`spectral_echo`, directions by strength; what was not measured is NaN, never 0."""

    layer: str
    shape: tuple[int, int]  # p, q
    replicates: int  # R
    method: str  # of the decompositions: "svd", "gram" or "randomized"
    noise: Noise
    identifiable: int  # k directions are found in one replicate: the first k of every array
    candidates: int  # directions whose singular value exceeds what noise of independent entries makes
    measured: int  # K directions were measured
    stable_rank: float | None  # of the mean of all replicates; None where that is zero
    mean: Directions  # directions of that mean, C = 1; at least the identifiable ones
    echo: Float64  # [D], mean over the replicates of corrected triple least squares
    interval: Float64  # [D, 2], of the echo: 95 %, jackknife over replicates
    null: Float64  # [D], 95 % quantile of the echo that chance shows, over all directions together
    by_replicate: Float64  # [R, D], echo of each replicate, by triple least squares
    pooled: Float64  # [D], pooled estimate of the echo
    pooled_interval: Float64  # [D, 2]
    diagonal: Float64  # [D], size of the gradient along the directions of a replicate, mean over replicates
    diagonal_interval: Float64  # [D, 2]
    residual: Float64  # [D], misfit of the model Z_ab = ζ_a ζ_b
    blocks: tuple[tuple[int, int], ...]  # ranges of directions that noise rotates into one another
    block_echo: Float64  # [D], echo of the block of each direction; NaN for blocks of more than 128
    singular_values: Float64  # [R, D], descending in each replicate
    singular_value: Float64  # [D], of the direction, median over the replicates
    singular_value_interval: Float64  # [D, 2], quantiles over the replicates
    strength: Float64  # [D], singular value without noise, from the mean of the replicates
    expected: Float64  # [D], echo that the spiked model expects at that strength
    shrunk: Float64  # [D], Frobenius-optimal shrinkage of ``singular_value``
    left_alignment: Float64  # [D], median overlap with the mean of the other replicates
    right_alignment: Float64  # [D]
    score: Float64  # [R, D], of the alignment, see backlight.measure.spectra.echo.Alignment
    ambiguity: Float64  # [R, D]
    permutation: Int64  # [R, D], which singular value of the replicate is direction i; -1 where not measured
    solver_residual: Float64  # [R, D], |A v - s u| over the replicate's largest singular value

    @property
    def aligned_values(self) -> Float64:
        """Singular values of each replicate in the order of the directions, ``[R, D]``; NaN: not measured.

        ``singular_values`` are descending in each replicate; direction i of replicate a is its number
        ``permutation[a, i]``.
        """
        values = np.take_along_axis(self.singular_values, np.maximum(self.permutation, 0), 1)
        return np.where(self.permutation >= 0, values, np.nan)


_BY_REPLICATE = frozenset(
    ("by_replicate", "singular_values", "score", "ambiguity", "permutation", "solver_residual")
)


def _padded(result: SpectralEcho, D: int) -> SpectralEcho:
    """Pad every array to D directions, with NaN or -1 where nothing was measured."""
    grown: dict[str, Any] = {}
    for field in fields(result):
        array = getattr(result, field.name)
        if isinstance(array, np.ndarray):
            axis = 1 if field.name in _BY_REPLICATE else 0
            missing = D - array.shape[axis]
            widths = [(0, 0)] * array.ndim
            widths[axis] = (0, max(0, missing))
            filler = -1 if array.dtype == np.int64 else np.nan
            grown[field.name] = np.pad(array, widths, constant_values=filler)
    return replace(result, **grown)


# The echo of a block of directions costs their number squared.
_MAX_BLOCK = 128

FOUND_RESIDUAL = 0.5
"""Misfit of ``Z_ab = ζ_a ζ_b`` up to which a direction counts as found.

Each of R pairs that share nothing has a misfit near 1; replicates that share a direction by echo .7 have .2.
"""


def spectral_echo(
    G: Tensor | Sequence[Tensor],
    *,
    layer: str = "",
    method: Method = "auto",
    max_directions: int | None = None,
    null_draws: int | None = None,
    matching: Matching = "auto",
    device: torch.device | str | None = None,
    budget: int = BUDGET_BYTES,
    seed: int = 0,
) -> SpectralEcho:
    """Measure the spectral echo of a gradient from its replicates.

    Parameters
    ----------
    G
        ``[R, p, q]``, or R tensors ``[p, q]``, R >= 3, of any floating type and on any device: gradients of
        batches of one size with disjoint data, before any reduction.
    layer
        Name of the layer in messages and in the result.
    method
        ``"auto"``: all directions where D is at most 320, else the identifiable ones, by a search where they
        are few and by the Gram matrix in float64 where they are many. ``"svd"`` measures all directions of
        any matrix, at the cost of 2 R full decompositions.
    max_directions
        Most directions to measure.
    null_draws
        Shufflings of the null, by default as many (2 to 16) as make 64 with the number of directions.
    matching
        How directions of a replicate are assigned to those of the reference: ``"hungarian"``, the largest
        sum of scores, ``"greedy"``, the largest score first, or ``"auto"``: greedy above 1024 directions.
    device
        Where to work; by default where the replicates are. From the host to CUDA they are copied in chunks.
    budget
        Bytes that a chunk may take there.
    seed
        Of the null.

    Returns
    -------
    SpectralEcho
        Independent of the order of the replicates and, to the tolerance of the decomposition (echo to 1e-3),
        of chunks and method.

    Raises
    ------
    ReplicateError
        If there are fewer than three replicates, they are not matrices of one shape and type, one holds NaN
        or infinite values, one is zero, or two are the same.
    DecompositionError
        If the decomposition of a replicate does not converge.
    ValueError
        If an option is unknown.
    """
    replicates = Replicates.of(G, layer=layer, least=3, device=device, budget=budget)
    replicates.refuse_zero()
    wide = replicates.wide()
    mean = wide.mean()
    level = noise_about(wide, mean)
    check_distinct(wide, level.variance)
    work = _Work(wide, mean, level, method, max_directions, null_draws, matching, seed)
    work.run()
    result = _result(work, stable_rank(mean, layer=layer))
    if replicates.shape[0] > replicates.shape[1]:
        result = replace(
            result,
            shape=replicates.shape,
            noise=replace(level, shape=replicates.shape),
            left_alignment=result.right_alignment,
            right_alignment=result.left_alignment,
            mean=replace(result.mean, left=result.mean.right, right=result.mean.left),
        )
    return result


class _Work:
    """Directions of every replicate, aligned; positions follow the order of the replicates."""

    def __init__(
        self,
        wide: Replicates,
        mean: Tensor,
        level: Noise,
        method: Method,
        max_directions: int | None,
        null_draws: int | None,
        matching: Matching,
        seed: int,
    ) -> None:
        self.wide, self.level, self.matching = wide, level, matching
        # Columns that the first chunk needed: the others need about as many.
        self.columns = (0, 0)
        pilot = wide.at(wide.order[0])
        self.plan: Plan = plan(
            mean.to(pilot.dtype), pilot, level, method=method, max_directions=max_directions, layer=wide.layer
        )
        R, K, J = len(wide), self.plan.directions, self.plan.candidates
        self.null = Null(
            min(16, max(2, math.ceil(64 / max(K, 1)))) if null_draws is None else null_draws, seed
        )
        p, q = wide.shape
        # The mean of the others is R/(R-1) of the mean less 1/(R-1) of the replicate.
        self.scaled_mean = (mean * (R / (R - 1))).to(pilot.dtype)
        self.left_RpJ = pilot.new_empty((R, p, J) if K else (R, p, 0))
        self.right_RqJ = pilot.new_empty((R, q, J) if K else (R, q, 0))
        self.values_RJ = np.full((R, J), np.nan)
        self.residual_RJ = np.full((R, J), np.nan)
        self.permutation_RK = np.zeros((R, K), dtype=np.int64)
        self.score_RK, self.ambiguity_RK = np.zeros((R, K)), np.zeros((R, K))
        self.overlaps_2RK = np.zeros((2, R, K))
        self.shuffled: Int64 = np.zeros((R, 0, 0), dtype=np.int64)

    def run(self) -> None:
        """Process all replicates, in chunks that fit into memory."""
        if not self.plan.directions:
            return
        p, q = self.wide.shape
        size = self.left_RpJ.element_size()
        each = {
            "randomized": 4 * p * q * size + 4 * (p + q) * 256 * size,
            "gram": 3 * p * q * size + 3 * (p * q + p * p) * 8,
            "svd": 8 * p * q * size,
        }
        shuffled: dict[int, Int64] = {}
        positions = {a: position for position, a in enumerate(self.wide.order)}

        def work(indices: tuple[int, ...], A_Cpq: Tensor) -> None:
            self._chunk([positions[a] for a in indices], indices, A_Cpq, shuffled)

        self.wide.chunks(work, bytes_each=each[self.plan.method])
        self.shuffled = np.stack([shuffled[position] for position in range(len(self.wide))])

    def _chunk(
        self, positions: list[int], names: tuple[int, ...], A_Cpq: Tensor, shuffled: dict[int, Int64]
    ) -> None:
        plan, K = self.plan, self.plan.directions
        R, start_pK = len(self.wide), plan.mean.left[0, :, :K]
        candidates = decompose(
            A_Cpq, plan.candidates, method=plan.method, edge=plan.edge, wanted=K, start_pb=start_pK,
            expected=self.columns[0], layer=self.wide.layer, names=names,
        )  # fmt: skip
        others_Cpq = A_Cpq.mul_(-1 / (R - 1)).add_(self.scaled_mean)
        refs = decompose(
            others_Cpq, K, method=plan.method, edge=plan.mean_edge, start_pb=start_pK,
            expected=self.columns[1], layer=self.wide.layer, names=[f"the others than {a}" for a in names],
        )  # fmt: skip
        if not any(self.columns):
            self.columns = (candidates.columns, refs.columns)
        self.left_RpJ[positions] = candidates.left
        self.right_RqJ[positions] = candidates.right
        self.values_RJ[positions] = candidates.values.cpu().numpy()
        self.residual_RJ[positions] = candidates.residual.cpu().numpy()
        for c, position in enumerate(positions):
            self._align(c, position, candidates, refs)
            shuffled[position] = self.null.permutations(
                position, candidates.left[c], candidates.right[c], refs.left[c], refs.right[c]
            )

    def _align(self, c: int, position: int, picks: Directions, refs: Directions) -> None:
        """Assign the candidates of one replicate to the directions of the mean, through its reference."""
        mean, K = self.plan.mean, self.plan.directions
        names = overlaps(refs.left[c], refs.right[c], mean.left[0, :, :K], mean.right[0, :, :K])
        chosen = torch.from_numpy(align(names.prod(0), self.matching).permutation).to(picks.left.device)
        sides = overlaps(picks.left[c], picks.right[c], refs.left[c][:, chosen], refs.right[c][:, chosen])
        aligned = align(sides.prod(0), self.matching)
        self.permutation_RK[position] = aligned.permutation
        self.score_RK[position], self.ambiguity_RK[position] = aligned.score, aligned.ambiguity
        self.overlaps_2RK[:, position] = sides[:, aligned.permutation, np.arange(K)]

    def cross_diagonal(self, left_RpK: Tensor, right_RqK: Tensor) -> Float64:
        """Return the size of each replicate along the directions of the others, ``[K, R, R]``, diagonal 0."""
        K, R = left_RpK.shape[2], len(self.wide)
        sizes = np.zeros((K, R, R))
        if not K:
            return sizes
        p, q = self.wide.shape
        positions = {a: position for position, a in enumerate(self.wide.order)}

        def work(indices: tuple[int, ...], G_Cpq: Tensor) -> None:
            G_Cpq = G_Cpq.to(left_RpK)
            sizes[:, :, [positions[a] for a in indices]] = estimate.cross_diagonal(left_RpK, right_RqK, G_Cpq)

        self.wide.chunks(work, bytes_each=2 * p * q * left_RpK.element_size())
        sizes[:, np.arange(R), np.arange(R)] = 0.0
        return sizes

    def aligned(self, columns_RnJ: Tensor) -> Tensor:
        """Return ``[R, n, K]``: the columns of every replicate in the order of the directions."""
        chosen = torch.from_numpy(self.permutation_RK).to(columns_RnJ.device)
        return torch.stack([x[:, order] for x, order in zip(columns_RnJ, chosen, strict=True)])


def _is_found(Z_1RR: Float64, null: float) -> bool:
    """Return whether replicates share a direction or block: more than chance shows, and alike in all pairs.

    That a singular value exceeds the edge is not enough: the noise of few samples is no noise of independent
    entries, and has large singular values of its own in every replicate.
    """
    low = float(estimate.interval_of_pooled(Z_1RR)[0, 0])
    misfit = float(estimate.residual(Z_1RR, estimate.triple(Z_1RR))[0])
    return low > max(0.0, np.nan_to_num(null)) and misfit <= FOUND_RESIDUAL


def _result(work: _Work, rank: float | None) -> SpectralEcho:
    wide, level, plan = work.wide, work.level, work.plan
    R, K, D = len(wide), plan.directions, wide.shape[0]
    p, q = wide.shape
    null_K = np.full(K, np.nan)
    if K and work.null.draws:
        by_chance = work.null.echoes(work.left_RpJ, work.right_RqJ, work.shuffled)
        null_K[:] = np.nanquantile(by_chance, 0.95)
    left_RpK, right_RqK = work.aligned(work.left_RpJ), work.aligned(work.right_RqJ)
    Z_KRR = estimate.reverb(left_RpK, right_RqK)
    zeta_KR = estimate.triple(Z_KRR)
    strength_K = strengths(plan, level, p, q)
    blocks = clusters(strength_K[: min(plan.identifiable, K)], level.sigma)
    echo_K = estimate.triple_mean(Z_KRR)
    block_K = np.full(K, np.nan)
    first_lost = None
    for begin, end in blocks:
        # Of a larger block only its first direction is asked.
        Z_1RR = Z_KRR[begin : begin + 1]
        if end - begin == 1:
            block_K[begin] = echo_K[begin]
        elif end - begin <= _MAX_BLOCK:
            Z_1RR = estimate.block_reverb(left_RpK, right_RqK, [(begin, end)])
            block_K[begin:end] = estimate.triple_mean(Z_1RR)
        if first_lost is None and not _is_found(Z_1RR, null_K[begin]):
            first_lost = begin
    values_RK = np.take_along_axis(work.values_RJ, work.permutation_RK, 1)
    D_KRR = work.cross_diagonal(left_RpK, right_RqK)
    tail = (1 - CONFIDENCE) / 2
    back = np.argsort(np.asarray(wide.order))
    top = work.values_RJ[:, :1]
    median = np.median(values_RK, axis=0)
    # A candidate that has not converged is no singular value yet.
    final = work.residual_RJ <= 0.01 * work.values_RJ
    result = SpectralEcho(
        layer=wide.layer,
        shape=(p, q),
        replicates=R,
        method=plan.method,
        noise=level,
        identifiable=min(plan.identifiable, K) if first_lost is None else first_lost,
        candidates=plan.identifiable,
        measured=K,
        stable_rank=rank,
        mean=plan.mean,
        echo=echo_K,
        interval=estimate.interval_of_echo(Z_KRR),
        null=null_K,
        by_replicate=zeta_KR.T[back],
        pooled=estimate.pooled(Z_KRR),
        pooled_interval=estimate.interval_of_pooled(Z_KRR),
        diagonal=D_KRR.sum((1, 2)) / (R * (R - 1)),
        diagonal_interval=estimate.pair_interval(D_KRR),
        residual=estimate.residual(Z_KRR, zeta_KR),
        blocks=blocks,
        block_echo=block_K,
        singular_values=np.where(final, work.values_RJ, np.nan)[back],
        singular_value=median,
        singular_value_interval=np.quantile(values_RK, [tail, 1 - tail], axis=0).T,
        strength=strength_K,
        expected=predict(strength_K, level.sigma, p, q).echo,
        shrunk=infer(median, level.sigma, p, q).shrunk,
        left_alignment=np.median(work.overlaps_2RK[0], axis=0),
        right_alignment=np.median(work.overlaps_2RK[1], axis=0),
        score=work.score_RK[back],
        ambiguity=work.ambiguity_RK[back],
        permutation=work.permutation_RK[back],
        solver_residual=(np.take_along_axis(work.residual_RJ, work.permutation_RK, 1) / top)[back],
    )
    return _padded(result, D)
