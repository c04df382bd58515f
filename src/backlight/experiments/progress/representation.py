"""Representation quality: how many parallelograms an embedding of numbers has (Liu et al., 2205.10343)."""

from __future__ import annotations

import torch
from torch import Tensor


def parallelograms(p: int) -> Tensor:
    """Return all (i, n, j, m) with i < j ≤ m < n below ``p`` and i + n = j + m, [count, 4]."""
    found = [
        (i, n, j, i + n - j)
        for i in range(p)
        for n in range(i + 1, p)
        for j in range(i + 1, n)
        if j <= i + n - j
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 4)


def representation_quality(embedding_pD: Tensor, tolerance: float = 0.01) -> float:
    """Return the share of parallelograms that an embedding has, 0 to 1.

    Each dimension is put to mean 0 and variance 1 (with p - 1) first; (i, n, j, m) counts where the mean
    square of E_i + E_n - E_j - E_m is below ``tolerance``. 1 for points in equal steps on a line. NaN
    for an embedding without spread.
    """
    points = embedding_pD.detach().to(torch.float64)
    spread = points.std(0)
    if not bool((spread > 0).all()):
        return float("nan")
    points = (points - points.mean(0)) / spread
    i, n, j, m = parallelograms(len(points)).to(points.device).T
    distance = (points[i] + points[n] - points[j] - points[m]).square().mean(1)
    return float((distance < tolerance).double().mean())
