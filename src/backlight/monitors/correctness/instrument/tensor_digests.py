"""Digests of whole tensors, by which ranks are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests_and_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``[2, P]``: the digest of each tensor of one device, and the bits of its fp32 norm."""
    with torch.no_grad():
        return torch.stack((_digests(tensors), _norms(tensors)))


def _digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``[P]``: the sum of the bits of each tensor, read as integers, in wrap-around arithmetic."""
    found = []
    for one in tensors:
        values = torch.view_as_real(one) if one.is_complex() else one
        size = values.element_size()
        # int32 into int64 is seven times slower on a CPU.
        found.append(values.view(_BITS[size]).sum(dtype=torch.int64 if size == 8 else torch.int32).long())
    return torch.stack(found)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``[P]``: the bits of the fp32 norm of each tensor."""
    floating = [_floating(one) for one in tensors]
    return torch.stack([n.float() for n in torch._foreach_norm(floating, 2)]).view(torch.int32).long()


def _floating(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.abs().float()
    return tensor if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.float()
