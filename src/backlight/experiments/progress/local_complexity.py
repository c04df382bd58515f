"""Local complexity (Humayun et al., 2402.15555): how many neurons' hyperplanes cut a neighbourhood."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backlight.experiments.data.random_streams import generator


def neighbourhood(inputs: int, directions: int, seed: int) -> Tensor:
    """Return orthonormal random directions [directions, inputs], at most ``inputs`` of them, fp64."""
    count = min(directions, inputs)
    drawn = torch.randn(inputs, count, generator=generator(seed, "neighbourhood"), dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(drawn).Q.T
    return basis


def local_complexity(
    before_activations: Callable[[Tensor], list[Tensor]], points: Tensor, frame: Tensor, radius: float
) -> float:
    """Return the mean over points of the number of neurons that change sign on the neighbourhood.

    The neighbourhood of a point x has the vertices x ± radius·v for v in ``frame``; a neuron counts
    where its input has both signs among the vertices. ``before_activations`` gives for samples the
    inputs of the activations of every layer, each [n, neurons]; the output layer does not belong there.
    """
    offsets = radius * torch.cat([frame, -frame]).to(points)
    vertices = (points[:, None, :] + offsets).flatten(0, 1)
    with torch.no_grad():
        crossings = torch.zeros(len(points), dtype=torch.int64, device=points.device)
        for layer in before_activations(vertices):
            positive = (layer > 0).view(len(points), len(offsets), -1)
            crossings += (positive.any(1) & ~positive.all(1)).sum(1)
    return float(crossings.double().mean())
