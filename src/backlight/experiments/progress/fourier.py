"""Fourier measures of nets on residues mod p: participation, restricted and excluded loss.

Frequencies are k = 0 to p // 2; the waves k and p - k are one frequency.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def power_spectrum(rows_Rp: Tensor) -> Tensor:
    """Return the power at each frequency, [R, p // 2 + 1] fp64: cosine and sine of it together."""
    p = rows_Rp.shape[1]
    power = torch.fft.rfft(rows_Rp.detach().to(torch.float64), dim=1).abs().square()
    doubled = torch.full((power.shape[1],), 2.0, dtype=torch.float64, device=power.device)
    doubled[0] = 1.0
    if p % 2 == 0:
        doubled[-1] = 1.0
    joined: Tensor = power * doubled / p
    return joined


def inverse_participation_ratio(rows_Rp: Tensor) -> float:
    """Return the mean over rows of Σ P_k² / (Σ P_k)², with P_k the power at frequency k.

    1 for rows that are one wave each, about 1/frequencies and upwards for noise (2/frequencies for
    Gaussian noise). Doshi et al. (2406.03495) take the spectrum of each neuron's weights; waves k and
    p - k are joined here, so that a real wave counts as one. Rows of zeros are left out; NaN where there
    are no others.
    """
    power = power_spectrum(rows_Rp)
    total = power.sum(1)
    kept = total > 0
    ratio = power[kept].square().sum(1) / total[kept].square()
    return float(ratio.mean())


def key_frequencies(embedding_pD: Tensor, count: int) -> list[int]:
    """Return the ``count`` frequencies k ≥ 1 with the most power in an embedding, sorted."""
    power = power_spectrum(embedding_pD.T).sum(0)[1:]
    return sorted((torch.topk(power, min(count, len(power))).indices + 1).tolist())


def sum_waves(p: int, frequencies: list[int], device: torch.device | None = None) -> Tensor:
    """Return orthonormal waves over all pairs, [2·frequencies, p²]: cos and sin of 2πk(a + b)/p.

    Pairs are in order of a then b.
    """
    residues = torch.arange(p, dtype=torch.float64, device=device)
    sums = (residues[:, None] + residues[None, :]).flatten()
    angles = 2 * torch.pi / p * torch.tensor(frequencies, dtype=torch.float64, device=device)[:, None] * sums
    waves = torch.cat([angles.cos(), angles.sin()])
    norms = waves.norm(dim=1, keepdim=True)
    kept: Tensor = (waves / norms)[norms[:, 0] > 1e-6 * p]  # the sine of frequency p/2 is 0
    return kept


def key_part(logits_PC: Tensor, p: int, frequencies: list[int]) -> Tensor:
    """Return the part of the logits of all p² pairs that the sum waves of ``frequencies`` carry, fp64."""
    waves = sum_waves(p, frequencies, logits_PC.device)
    part: Tensor = waves.T @ (waves @ logits_PC.detach().to(torch.float64))
    return part


Losses = Callable[[Tensor, Tensor], Tensor]


def restricted_loss(
    logits_PC: Tensor, labels_P: Tensor, p: int, frequencies: list[int], losses: Losses
) -> float:
    """Return the mean loss over all pairs where the logits keep their mean and key waves only.

    Nanda et al. (2301.05217), section 5: it falls before the test loss does. ``losses`` gives the loss
    of each pair, [P].
    """
    mean = logits_PC.detach().to(torch.float64).mean(0)
    return float(losses(key_part(logits_PC, p, frequencies) + mean, labels_P).mean())


def excluded_loss(
    logits_PC: Tensor,
    labels_P: Tensor,
    p: int,
    frequencies: list[int],
    trained: Tensor,
    losses: Losses,
) -> float:
    """Return the mean loss over the training pairs where the logits lose their key waves.

    Nanda et al. (2301.05217), section 5: it rises while the general solution is formed. ``trained``
    holds the places of the training pairs.
    """
    rest = logits_PC.detach().to(torch.float64) - key_part(logits_PC, p, frequencies)
    return float(losses(rest[trained], labels_P[trained]).mean())
