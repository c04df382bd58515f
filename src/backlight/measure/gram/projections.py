"""Inner products of per-sample gradients with one gradient, by position: ``<g_nt, G>`` without forming g.

A sample's products over all its positions add up to ``<g_n, G>``, those of all samples to ``<sum_n g_n, G>``.
N samples, T positions; docs/formulas.md, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backlight.measure.gram.factors import Factors, LookupFactors, MatrixFactors, VectorFactors
from backlight.measure.stats.kernels import promoted


@torch.no_grad()
def projections(uses: Sequence[Factors], gradient: Tensor) -> list[Tensor]:
    """Return the products of each use of a parameter with its ``gradient``, float64 ``[N, T]`` each.

    ``gradient`` has the shape of the parameter. T is 1 where a use keeps no positions.
    """
    return [_of_use(use, promoted(gradient)) for use in uses]


def _of_use(use: Factors, gradient: Tensor) -> Tensor:
    if isinstance(use, VectorFactors):
        return (use.values.double() @ gradient.double().reshape(-1)).unsqueeze(1)
    if isinstance(use, LookupFactors):
        table = gradient.reshape(-1, use.columns)
        return (table[use.ids].double() * promoted(use.delta).double()).sum(-1)
    return _of_matrix(use, gradient.reshape(use.groups, -1, use.columns))


def _of_matrix(use: MatrixFactors, G_goi: Tensor) -> Tensor:
    found = []
    for n in range(use.samples):  # a convolution unfolds one sample at a time
        x_Tgi = promoted(use.inputs(n, n + 1)[0])
        d_Tgo = promoted(use.delta[n])
        mapped_gTo = torch.bmm(x_Tgi.transpose(0, 1).to(G_goi.dtype), G_goi.transpose(1, 2))
        found.append((mapped_gTo.double() * d_Tgo.transpose(0, 1).double()).sum((0, 2)))
    return torch.stack(found)
