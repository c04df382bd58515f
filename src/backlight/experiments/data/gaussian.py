"""Gaussian samples with a random linear teacher, and the closed form of a linear student's training."""

from __future__ import annotations

import torch
from torch import Tensor

from backlight.experiments.data.random_streams import generator
from backlight.experiments.data.split import Split


def linear_teacher(
    inputs: int, outputs: int, train_size: int, test_size: int, seed: int
) -> tuple[Split, Tensor]:
    """Return samples x ~ N(0, I) with targets x Tᵀ, and the teacher T [outputs, inputs], all fp64.

    T has entries N(0, 1/(2·inputs·outputs)), as Levi et al. (2310.16441) draw teacher and student.
    """
    draw = generator(seed, "teacher")
    teacher = torch.randn(outputs, inputs, generator=draw, dtype=torch.float64)
    teacher *= (2 * inputs * outputs) ** -0.5
    samples = torch.randn(train_size + test_size, inputs, generator=draw, dtype=torch.float64)
    targets = samples @ teacher.T
    return Split(
        samples[:train_size], targets[:train_size], samples[train_size:], targets[train_size:]
    ), teacher


def closed_form(difference: Tensor, samples: Tensor, lr: float, step: int) -> Tensor:
    """Return D_t = D₀ (I - 2ηΣ/outputs)^t, the difference of student and teacher after ``step`` steps.

    Parameters
    ----------
    difference:
        D₀ = S₀ - T, [outputs, inputs].
    samples:
        Training samples [N, inputs]; Σ = XᵀX/N.

    The power is taken of the eigenvalues of Σ (Levi et al. 2310.16441), so that it is independent of a
    loop over the steps.
    """
    values, vectors = torch.linalg.eigh(samples.T @ samples / len(samples))
    factor = (1 - 2 * lr * values / len(difference)) ** step
    reached: Tensor = difference @ (vectors * factor) @ vectors.T
    return reached
