"""G G^T and G^T G of a matrix gradient G ``[p, q]``, in float64.

Both have the squared singular values of G as eigenvalues, p and q of them; all but ``min(p, q)`` are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backlight.measure.gram.eigenvalues import Spectrum, spectrum


def as_matrix(gradient: Tensor) -> Tensor:
    """Return a gradient as ``[p, q]``, output dimension first; further dimensions are inputs.

    Raises
    ------
    ValueError
        If it has fewer than two dimensions: the product of a vector has rank one and tells nothing.
    """
    if gradient.dim() < 2:
        raise ValueError(
            f"G G^T needs a gradient with at least two dimensions, got {list(gradient.shape)}; that of a "
            "vector has rank one, and its norm says all"
        )
    return gradient.detach().flatten(1)


def left_product(gradient: Tensor) -> Tensor:
    """Return G G^T, float64 ``[p, p]``."""
    G = as_matrix(gradient).double()
    return G @ G.T


def right_product(gradient: Tensor) -> Tensor:
    """Return G^T G, float64 ``[q, q]``."""
    G = as_matrix(gradient).double()
    return G.T @ G


def product_spectrum(gradient: Tensor, *, top: int | None = None) -> Spectrum:
    """Return the ``min(p, q)`` eigenvalues that G G^T and G^T G share, through the smaller product.

    Parameters
    ----------
    gradient
        ``[p, q]``, or more dimensions, which count as inputs.
    top
        Only so many of the largest.

    Returns
    -------
    Spectrum
        Its eigenvalues are squared singular values (not divided by p or q); coherence and noise scale
        have no meaning for it.
    """
    matrix = as_matrix(gradient)
    tall = matrix.shape[0] > matrix.shape[1]
    product = right_product(matrix) if tall else left_product(matrix)
    return spectrum(product * product.shape[0], top=top, piece_eps=torch.finfo(gradient.dtype).eps)
