"""The echo that chance alone would show: replicates whose directions have nothing in common.

The coordinates of each replicate are shuffled and their signs flipped, on both sides, independently of
the other replicates. Spectrum and norms stay, what the replicates share is gone, and the alignment picks
its best matches as it does for the true ones. So the bias of picking is in the null as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.measure.spectra.alignment import Method, align, overlap_scores
from backlight.measure.spectra.echo import ESTIMATORS, Estimator, reverb

MOST = 256
"""Directions and candidates that the null is taken from, at most: the best of many is hardly better."""


@dataclass(frozen=True)
class Null:
    """Shuffled controls of every replicate, each aligned with the reference of the replicate.

    Attributes
    ----------
    draws
        Number of shufflings.
    seed
        Of the random numbers.
    alignment
        How directions are assigned.
    """

    draws: int
    seed: int
    alignment: Method

    def permutations(
        self, position: int, left_pJ: Tensor, right_qJ: Tensor, ref_left_pK: Tensor, ref_right_qK: Tensor
    ) -> NDArray[np.int64]:
        """Align the controls of one replicate, ``[draws, min(K, MOST)]``.

        ``position`` numbers the replicate.
        """
        J, K = min(left_pJ.shape[1], MOST), min(ref_left_pK.shape[1], MOST)
        found = np.zeros((self.draws, K), dtype=np.int64)
        for draw in range(self.draws):
            left, right = self._shuffled(draw, position, left_pJ[:, :J], right_qJ[:, :J])
            score = overlap_scores(
                torch.matmul(left.T, ref_left_pK[:, :K]).cpu().numpy(),
                torch.matmul(right.T, ref_right_qK[:, :K]).cpu().numpy(),
            )
            found[draw] = align(score, method=self.alignment).permutation
        return found

    def echoes(
        self,
        left_RpJ: Tensor,
        right_RqJ: Tensor,
        permutations: NDArray[np.int64],
        estimator: Estimator,
    ) -> NDArray[np.float64]:
        """Return the echo of each draw ``[draws, K]``; ``permutations`` is ``[R, draws, K]``."""
        found = np.zeros((self.draws, permutations.shape[2]))
        for draw in range(self.draws):
            lefts, rights = [], []
            for position in range(left_RpJ.shape[0]):
                chosen = torch.from_numpy(permutations[position, draw]).to(left_RpJ.device)
                left, right = self._shuffled(
                    draw, position, left_RpJ[position][:, chosen], right_RqJ[position][:, chosen]
                )
                lefts.append(left)
                rights.append(right)
            found[draw] = ESTIMATORS[estimator](reverb(torch.stack(lefts), torch.stack(rights)))
        return found

    def _shuffled(self, draw: int, position: int, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng((self.seed, draw, position))
        both = []
        for columns in (left, right):
            rows = columns.shape[0]
            order = torch.from_numpy(generator.permutation(rows)).to(columns.device)
            sign = torch.from_numpy(generator.integers(0, 2, rows) * 2.0 - 1.0).to(columns)
            both.append(columns[order] * sign[:, None])
        return both[0], both[1]
