"""Progress measures of how a net depends on its input: attacks, input AGOP, local complexity."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from backlight.experiments.data.split import generator


def attacked(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    radius: float,
    steps: int,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Return ``inputs`` moved against ``model`` within ``radius`` in l∞ and within [low, high].

    Projected gradient ascent of the cross-entropy (Madry et al., 1706.06083) from the inputs themselves,
    without a random start, in steps of 2.5·radius/steps. Gradients are taken with respect to inputs
    alone: no ``.grad`` is written.
    """
    origin, moved = inputs.detach(), inputs.detach().clone()
    size = 2.5 * radius / steps
    with torch.enable_grad():
        for _ in range(steps):
            moved.requires_grad_(True)
            loss = nn.functional.cross_entropy(model(moved), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, moved)
            step = moved.detach() + size * gradient.sign()
            moved = torch.clamp(torch.clamp(step, origin - radius, origin + radius), low, high)
    return moved.detach()


def adversarial_accuracy(
    model: nn.Module, inputs: Tensor, labels: Tensor, *, radius: float, steps: int
) -> float:
    """Return the accuracy after :func:`attacked`."""
    moved = attacked(model, inputs, labels, radius=radius, steps=steps)
    with torch.no_grad():
        return float((model(moved).argmax(1) == labels).double().mean())


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
    """Return the deviation of the blocks [p, p] of ``matrix`` from circulant: ‖M - C‖² / ‖M‖², 0 to 1.

    C is the nearest matrix whose blocks are circulant (entries depend on j - i mod p) or, where that is
    nearer, anticirculant (i + j mod p): the mean along each wrapped diagonal. Modular addition learned
    from one-hot pairs gives such blocks (2407.20199). NaN for the zero matrix.
    """
    square = matrix.detach().to(torch.float64)
    total = float(square.square().sum())
    if not total:
        return float("nan")
    index = torch.arange(p, device=square.device)
    rest = 0.0
    for block in (b for rows in torch.split(square, p) for b in torch.split(rows, p, 1)):
        deviations = []
        for diagonal in ((index[None] - index[:, None]) % p, (index[None] + index[:, None]) % p):
            sums = torch.zeros(p, dtype=torch.float64, device=square.device)
            sums.index_add_(0, diagonal.flatten(), block.flatten())
            deviations.append(float((block - (sums / p)[diagonal]).square().sum()))
        rest += min(deviations)
    return rest / total


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
