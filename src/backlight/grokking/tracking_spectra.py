"""Eigenvalues of products of gradients other than the Gram of samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backlight.measure.eigenvalues import Spectrum


def matrix_spectrum(gradient: Tensor, device: torch.device | str | None = None) -> Spectrum:
    """Return the eigenvalues of G Gᵀ, which are the non-zero ones of GᵀG, [min(p, q)], largest first.

    G is the gradient of a weight as outputs x everything else. They come from its singular values in
    float64, squared: the product itself would square the condition number. Its rank is therefore counted
    at the tolerance of singular values, ``max(p, q) eps s_max``, squared.

    Raises
    ------
    ValueError
        If the gradient holds values that are not finite.
    """
    G = gradient.detach().reshape(gradient.shape[0], -1)
    G = G.to(device=device, dtype=torch.complex128 if G.is_complex() else torch.float64)
    if not bool(torch.isfinite(G).all()):
        raise ValueError("the gradient holds values that are not finite; `backlight nan` finds where")
    singular: npt.NDArray[np.float64] = torch.linalg.svdvals(G).cpu().numpy()
    values = np.square(singular)
    tolerance = (max(G.shape) * float(np.finfo(np.float64).eps) * float(singular[0])) ** 2
    # "centred", so that no coherence or noise scale is told: there are no samples here.
    return Spectrum(
        eigenvalues=values,
        samples=len(values),
        centred=True,
        trace=float(values.sum()),
        frobenius=float(np.linalg.norm(values)),
        clamped=0,
        most_negative=0.0,
        tolerance=tolerance,
    )


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that have a value: what a zero matrix leaves undefined is missing, not NaN."""
    return {name: value for name, value in metrics.items() if value == value}  # noqa: PLR0124 - NaN
