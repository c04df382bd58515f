"""How far the span of singular directions has moved between two steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Drift:
    """Where a k-dimensional subspace of an n-dimensional space has gone.

    Attributes
    ----------
    cosines
        Of the k principal angles, descending.
    dimension
        n.
    """

    cosines: NDArray[np.float64]
    dimension: int

    @property
    def overlap(self) -> float:
        """Mean squared cosine, in [0, 1]: 1 for the same subspace; see :attr:`chance`."""
        return float(np.mean(self.cosines**2))

    @property
    def chance(self) -> float:
        """The overlap that is expected of two random subspaces, k / n."""
        return len(self.cosines) / self.dimension

    @property
    def distance(self) -> float:
        """Root mean square of the sines of the principal angles (chordal distance over sqrt k)."""
        return math.sqrt(max(0.0, 1 - self.overlap))

    @property
    def angle(self) -> float:
        """The largest principal angle, in radians."""
        return float(np.arccos(np.clip(np.min(self.cosines), 0.0, 1.0)))


def drift(before_nk: Tensor, after_nk: Tensor) -> Drift:
    """Compare two subspaces by their principal angles, in float64.

    Bjorck and Golub, "Numerical methods for computing angles between linear subspaces", Math. Comp. 27
    (1973).

    Parameters
    ----------
    before_nk, after_nk
        Orthonormal columns, left or right singular directions of two steps.

    Raises
    ------
    ValueError
        If the shapes differ, there is no direction, or the columns are not orthonormal (to 1e-3).
    """
    if before_nk.ndim != 2 or before_nk.shape != after_nk.shape or not before_nk.numel():
        raise ValueError(
            f"expected two matrices [n, k] of one shape, got {tuple(before_nk.shape)} and "
            f"{tuple(after_nk.shape)}"
        )
    one, other = before_nk.double(), after_nk.double()
    for name, columns in (("before", one), ("after", other)):
        excess = columns.T @ columns - torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
        if not float(excess.abs().max()) < 1e-3:
            raise ValueError(f"the columns of {name!r} are not orthonormal")
    cosines = torch.linalg.svdvals(one.T @ other).clamp(max=1.0)
    return Drift(cosines.cpu().numpy(), before_nk.shape[0])
