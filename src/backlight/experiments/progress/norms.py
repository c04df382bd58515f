"""Norms of weights: of all (Liu et al., 2210.01117), and of the last layer (Thilak et al., 2206.04817)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def weight_norm(parameters: Iterable[Tensor]) -> float:
    """Return √Σ‖p‖² over ``parameters``, summed in fp64."""
    total = sum(float(p.detach().to(torch.float64).square().sum()) for p in parameters)
    return float(total**0.5)
