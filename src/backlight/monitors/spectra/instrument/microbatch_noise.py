"""Squared norms and products of the per-sample gradients of one microbatch, as its backward runs.

A Gram per parameter from the calls of its layer, at the moment at which its gradient arrives. The sum of its
entries must be the squared norm of that gradient, whatever the loss is reduced by; a parameter where it is
not, or that no known layer uses, is not measured, and its share of the squared norm is stated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backlight.measure.gram.factors import Factors, coarsest_dtype, sizes
from backlight.measure.gram.gram import gram
from backlight.measure.gram.layers import kernel_of
from backlight.measure.noise_scale import NoiseScale, noise_scale

UNKNOWN = "no layer that backlight knows uses it"
LEAST_SAMPLES = 2
"""Fewest samples that show any noise."""

MOST_GRADIENTS = 512
"""Most gradients of a Gram; of a larger microbatch they are those of groups of neighbouring samples."""

LEAST_GROUPS = 8
"""Fewest groups of a microbatch that is too large to measure single samples."""


def groups_of(samples: int) -> int:
    """Return the number of equal groups that a microbatch is divided into: its samples, if they are few."""
    return next((n for n in range(min(samples, MOST_GRADIENTS), 1, -1) if samples % n == 0), 1)


@dataclass
class PendingNoise:
    """What was measured of a parameter: numbers that may still be on a device."""

    gradient: Tensor  # its squared norm
    squares: Tensor | None = None  # [groups]
    products: Tensor | None = None  # [groups], with the sum of all
    slack: Tensor | None = None
    reason: str = ""


@dataclass
class MicrobatchNoise:
    """The noise scale of a microbatch, and of each layer that was measured.

    ``shares`` are those of the squared norm of the gradient by layer, ``unmeasured`` reason and share by
    parameter. ``model`` is that of the measured parameters together, ``covered`` their share; None where no
    parameter is measured.
    """

    samples: int
    model: NoiseScale | None = None
    covered: float = 0.0
    layers: dict[str, NoiseScale] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    unmeasured: dict[str, tuple[str, float]] = field(default_factory=dict)
    reason: str = ""


def refused(model: nn.Module, samples: int | None) -> str:
    """Return why the samples of a forward of ``model`` cannot be told apart; empty where they can."""
    if samples is None or samples < LEAST_SAMPLES:
        return f"the model was called with {samples or 'no known number of'} samples; two or more are needed"
    if samples > MOST_GRADIENTS and groups_of(samples) < LEAST_GROUPS:
        return f"{samples} samples cannot be divided into {LEAST_GROUPS} to {MOST_GRADIENTS} equal groups"
    for module in nn.Module.modules(model):
        kind = type(module).__name__
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            return "the model is compiled: the calls of its layers are not observable"
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or module.running_mean is None
        ):
            return f"{kind} in training mode mixes the samples of a batch"
        if getattr(module, "batch_first", True) is False:
            return f"{kind} has batch_first=False: samples are not along the first dimension"
    return ""


class MicrobatchMeasurement:
    """Collects one microbatch of ``samples``, in ``groups`` of as many neighbouring ones each."""

    def __init__(self, samples: int) -> None:
        self.samples, self.groups = samples, groups_of(samples)
        self.reason = ""
        self._uses: dict[int, list[Factors]] = {}
        self._skipped: dict[int, str] = {}
        self._pending: dict[int, PendingNoise] = {}

    def skip(self, layer: nn.Module, reason: str) -> None:
        """Leave out the parameters of a layer."""
        for parameter in layer._parameters.values():
            if parameter is not None:
                self._skipped[id(parameter)] = reason

    def add(self, layer: nn.Module, x: Tensor, delta: Tensor) -> None:
        """Add a call; ``x`` and ``delta`` must have the samples along their first dimension."""
        if self.reason:
            return
        kernel = kernel_of(layer)
        inner = x.shape[1 : _features_from(layer, x)]
        if kernel is None or x.shape[:1] != (self.samples,) or delta.shape[:1] != (self.samples,):
            reason = f"its input {list(x.shape)} has not the {self.samples} samples along its first dimension"
            self.skip(layer, reason)
        elif self.samples in inner:
            self.reason = (
                f"the input {list(x.shape)} of a {type(layer).__name__} has another dimension of "
                f"{self.samples}: which one is that of the samples is not known; take another batch size"
            )
        else:
            pieces = kernel(layer, x, delta, self.groups)
            for key, parameter in layer._parameters.items():
                if parameter is not None and key in pieces:
                    self._uses.setdefault(id(parameter), []).append(pieces[key])

    def close(self, key: int, parameter: Tensor, gradient: Tensor) -> None:
        """Measure a parameter, all of whose calls have arrived with its gradient."""
        uses, reason = self._uses.pop(id(parameter), []), self._skipped.get(id(parameter), "")
        gradient = gradient.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce().values() if gradient.is_sparse else gradient.to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        pending = PendingNoise(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
        if key in self._pending:
            pending.reason = "its gradient arrived in parts"
            pending.gradient = pending.gradient + self._pending[key].gradient
        elif reason or not uses:
            pending.reason = reason or UNKNOWN
        else:
            with torch.no_grad():
                # With single positions no time has to be measured to know which kernel is faster.
                single = all(getattr(use, "positions", 1) == 1 for use in uses)
                K, *_ = gram(uses, kernel="ghost" if single else "auto")
                eps = torch.finfo(coarsest_dtype(uses)).eps
                summands = torch.linalg.vector_norm(sizes(uses), dtype=torch.float64)
                norm = pending.gradient.sqrt()
                pending.squares, pending.products = K.diagonal().clone(), K.sum(1)
                pending.slack = 16 * eps * (torch.linalg.vector_norm(K, 1) + (summands + norm) * norm)
        self._pending[key] = pending

    def release(self) -> None:
        """Drop what belongs to parameters without a gradient: the backward is over."""
        self._uses.clear()

    def result(self, names: Mapping[int, str]) -> MicrobatchNoise:
        """Return the noise scales, with the names of parameters by key; waits for the device."""
        out = MicrobatchNoise(self.samples, reason=self.reason)
        total = sum(float(pending.gradient) for pending in self._pending.values())
        if not self._pending and not out.reason:
            out.reason = "no gradient of a watched parameter was observed in the backward pass"
        if not math.isfinite(total) and not out.reason:
            out.reason = "its gradient holds NaN or infinite values"
        if out.reason:
            return out
        layers: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for key, p in self._pending.items():
            name, share = names[key], float(p.gradient) / total if total else 0.0
            if p.squares is None or p.products is None or p.slack is None:
                out.unmeasured[name] = p.reason, share
            elif not abs(float(p.products.sum()) - float(p.gradient)) <= float(p.slack) < math.inf:
                reason = "the calls of its layers do not add up to its gradient: a use escaped, or a hook"
                out.unmeasured[name] = f"{reason} changes it", share
            else:
                layer = name.rpartition(".")[0] or name
                layers.setdefault(layer, []).append((p.squares.cpu(), p.products.cpu()))
                out.shares[layer] = out.shares.get(layer, 0.0) + share
        out.covered = sum(out.shares.values())
        out.layers = {layer: self._scale(parts) for layer, parts in layers.items()}
        if layers:
            out.model = self._scale([part for parts in layers.values() for part in parts])
        return out

    def _scale(self, parts: Sequence[tuple[Tensor, Tensor]]) -> NoiseScale:
        squares, products = (torch.stack(column).sum(0).numpy() for column in zip(*parts, strict=True))
        return noise_scale(squares, products, self.samples / self.groups)


def _features_from(layer: Any, x: Tensor) -> int:
    """Return the first dimension that is not one of positions, whose size may be anything."""
    if isinstance(layer, nn.Embedding):
        return x.dim()
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return x.dim() - len(layer.normalized_shape)
    return x.dim() - 1 if isinstance(layer, nn.Linear) else 1
