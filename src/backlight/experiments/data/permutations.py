"""The symmetric group: every pair of permutations with its composition."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def permutation_table(degree: int = 5) -> tuple[Tensor, Tensor]:
    """Return pairs [n², 2] and results [n²] of a∘b in S_degree, with n = degree!, int64.

    Permutations are numbered in lexicographic order, 0 being the identity, and
    (a∘b)(x) = a(b(x)): b acts first.
    """
    elements = torch.tensor(list(itertools.permutations(range(degree))))
    count = len(elements)
    place = degree ** torch.arange(degree)
    codes = elements @ place
    order = torch.argsort(codes)
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    composed = torch.gather(elements[pairs[:, 0]], 1, elements[pairs[:, 1]])
    return pairs, order[torch.searchsorted(codes[order], composed @ place)]
