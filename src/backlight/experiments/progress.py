"""Progress measures: of inputs (attacks, local complexity), weights, embeddings and logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    holds the indices of the training pairs.
    """
    rest = logits_PC.detach().to(torch.float64) - key_part(logits_PC, p, frequencies)
    return float(losses(rest[trained], labels_P[trained]).mean())


def parallelograms(p: int) -> Tensor:
    """Return all (i, n, j, m) with i < j ≤ m < n below ``p`` and i + n = j + m, [count, 4]."""
    quadruples = [
        (i, n, j, i + n - j)
        for i in range(p)
        for n in range(i + 1, p)
        for j in range(i + 1, n)
        if j <= i + n - j
    ]
    return torch.tensor(quadruples, dtype=torch.int64).reshape(-1, 4)


def representation_quality(embedding_pD: Tensor, tolerance: float = 0.01) -> float:
    """Return the share of parallelograms that an embedding has, 0 to 1.

    Each dimension is put to mean 0 and variance 1 (with p - 1) first; (i, n, j, m) counts where the mean
    square of E_i + E_n - E_j - E_m is below ``tolerance``. 1 for points in equal steps on a line. NaN
    for an embedding without spread.
    """
    points = embedding_pD.detach().to(torch.float64)
    spread = points.std(0)
    if not bool((spread > 0).all()):
        return float("nan")
    points = (points - points.mean(0)) / spread
    i, n, j, m = parallelograms(len(points)).to(points.device).T
    distance = (points[i] + points[n] - points[j] - points[m]).square().mean(1)
    return float((distance < tolerance).double().mean())


def weight_norm(parameters: Iterable[Tensor]) -> float:
    """Return √Σ‖p‖² over ``parameters``, summed in fp64."""
    total = sum(float(p.detach().to(torch.float64).square().sum()) for p in parameters)
    return float(total**0.5)


def softmax_collapse(logits_NC: Tensor) -> float:
    """Return the share of samples whose sum of exponentials is exactly that of the largest logit.

    There the other classes are absorbed in the precision of ``logits_NC``, and a sample whose largest
    logit is its label gives a loss and a gradient of exactly 0.
    """
    shifted = logits_NC.detach() - logits_NC.detach().amax(1, keepdim=True)
    return float((shifted.exp().sum(1) == 1).double().mean()) if len(logits_NC) else float("nan")


def smallest_margin(logits_NC: Tensor, labels_N: Tensor) -> float:
    """Return the smallest lead of a label's logit over the best other one, over N samples."""
    label_logits = logits_NC.detach().gather(1, labels_N[:, None])
    others = logits_NC.detach().scatter(1, labels_N[:, None], -torch.inf).amax(1, keepdim=True)
    return float((label_logits - others).min())
