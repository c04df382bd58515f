"""The average gradient outer product with respect to inputs, and what is read off it.

E[JᵀJ] with J the Jacobian of the outputs (Radhakrishnan et al., 2212.13881; Mallinar et al.,
2407.20199, on modular arithmetic).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def input_agop(model: nn.Module, inputs_ND: Tensor) -> Tensor:
    """Return Σ_n J_nᵀJ_n / N, [D, D] fp64, one backward for each output; no ``.grad`` is written."""
    inputs = inputs_ND.detach().requires_grad_(True)
    product = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=torch.float64, device=inputs.device)
    with torch.enable_grad():
        outputs = model(inputs)
        for column in range(outputs.shape[1]):
            (rows,) = torch.autograd.grad(outputs[:, column].sum(), inputs, retain_graph=True)
            rows = rows.to(torch.float64)
            product += rows.T @ rows
    return product / len(inputs)


def alignment(first: Tensor, second: Tensor) -> float:
    """Return the cosine between two matrices in the Frobenius product; NaN where one is 0.

    Between the AGOP and WᵀW of the first layer it is the alignment of the neural feature ansatz.
    """
    a, b = first.detach().to(torch.float64), second.detach().to(torch.float64)
    norms = float(a.norm() * b.norm())
    return float((a * b).sum()) / norms if norms else float("nan")


def circulant_deviation(matrix: Tensor, p: int) -> float:
    """Return how far the blocks [p, p] of ``matrix`` are from circulant: ‖M - C‖² / ‖M‖², 0 to 1.

    C is the nearest matrix whose blocks are circulant (entries depend on j - i mod p) or, where that is
    nearer, anticirculant (i + j mod p): the mean along each wrapped diagonal. Modular addition learned
    from one-hot pairs gives such blocks (2407.20199). NaN for the zero matrix.
    """
    square = matrix.detach().to(torch.float64)
    total = float(square.square().sum())
    if not total:
        return float("nan")
    place = torch.arange(p, device=square.device)
    rest = 0.0
    for block in (b for rows in torch.split(square, p) for b in torch.split(rows, p, 1)):
        deviations = []
        for diagonal in ((place[None] - place[:, None]) % p, (place[None] + place[:, None]) % p):
            sums = torch.zeros(p, dtype=torch.float64, device=square.device)
            sums.index_add_(0, diagonal.flatten(), block.flatten())
            deviations.append(float((block - (sums / p)[diagonal]).square().sum()))
        rest += min(deviations)
    return rest / total
