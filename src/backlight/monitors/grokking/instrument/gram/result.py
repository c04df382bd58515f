"""The result of a measurement: Grams of the model and its parts, their spectra and eigenvectors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backlight.measure.gram.eigenvalues import Spectrum, eigenpairs, spectrum
from backlight.measure.noise_scale import NoiseScale, noise_scale
from backlight.monitors.grokking.instrument.gram.checks import GramCoverage, GramError

DETAILS = ("parameter", "layer", "block", "model")
"""How finely Grams are kept, finest first."""


@dataclass(frozen=True)
class Location:
    """The name of a parameter, the module that owns it (``layer``), and its block."""

    name: str
    layer: str
    block: str

    def key(self, detail: str) -> str:
        """Return the key of this parameter in Grams of that detail."""
        return {"parameter": self.name, "layer": self.layer, "block": self.block, "model": "model"}[detail]


def block_of(name: str) -> str:
    """Return the block of a parameter: its name up to the first number, else its first part."""
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]


@dataclass(frozen=True)
class Gram:
    """Exact inner products of per-sample gradients.

    There are ``samples`` N, along the first dimension of the batch's tensors. ``detail`` is how finely Grams
    were kept. ``locations`` has module and block of each parameter in model order, tied ones under their
    first name; ``coverage`` how its Gram was obtained, and its checks, none of which failed. ``unchecked`` is
    why the independence of the samples could not be checked; empty if it was, at this measurement or an
    earlier one of the same kind. ``eps`` and ``rounding`` are the machine epsilon of the coarsest type that
    gradients came in, and were multiplied in. The last ``against`` samples are those of a second batch.
    """

    samples: int
    detail: str
    locations: Mapping[str, Location]
    coverage: Mapping[str, GramCoverage]
    unchecked: str
    eps: float
    rounding: float
    _matrices: Mapping[str, Tensor] = field(repr=False)
    _combine: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = field(repr=False)
    _means: dict[str, Tensor | None] = field(repr=False)
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False)
    against: int = 0

    def __repr__(self) -> str:
        """Return size, detail and kernels, without any of its numbers."""
        methods = Counter(coverage.method for coverage in self.coverage.values())
        kernels = ", ".join(f"{amount} {method}" for method, amount in sorted(methods.items()))
        return f"Gram({self.samples} samples, by {self.detail}, {len(self.locations)} parameters: {kernels})"

    @property
    def piece_eps(self) -> float:
        """Bound on the smallest eigenvalue distinguishable from 0, relative to N and the largest."""
        return max(self.eps, math.sqrt(self.rounding))

    @property
    def matrix(self) -> Tensor:
        """The Gram over all parameters, float64 ``[N, N]``."""
        if "model" not in self._cache:
            self._cache["model"] = _sum(self._matrices)
        return self._cache["model"]

    def cross(self, scope: str = "model") -> Tensor:
        """Return samples of the batch against those of the second one, float64 ``[N, M]``.

        Raises
        ------
        GramError
            If it was measured without a second batch, or the scope does not exist.
        """
        if not self.against:
            raise GramError("gram: there is no second batch; measure with gram(..., against=batch)")
        size = self.samples - self.against
        return self.scope(scope)[:size, size:]

    def influence(self, scope: str = "model") -> Tensor:
        """Return how much of a drop of the second batch's summed loss each sample carries, float64 ``[N]``.

        ``<g_n, sum_m g_m>``: to first order a step ``-rate * weight * g_n`` lowers that loss by ``rate *
        weight`` times this (TracIn, one step; Pruthi et al., 2002.08484). Negative ones raise it.
        """
        return self.cross(scope).sum(1)

    @property
    def mean_gradient(self) -> Mapping[str, Tensor | None]:
        """Mean per-sample gradient by parameter, None where the loss does not depend on it.

        A measurement that was not checked has not computed it: the model is then run once more.

        Raises
        ------
        GramError
            If its norm is not that of the Gram, because parameters or batch have changed since.
        """
        if not self._means:
            weights = self.matrix.new_full((1, self.samples), 1 / self.samples)
            means = self._combine(dict.fromkeys(self.locations, weights))
            square = sum(float(mean.square().sum()) for mean in means.values())
            expected = float(self.matrix.sum()) / self.samples**2
            rounding = 64 * self.eps * float(self.matrix.abs().sum()) / self.samples**2
            if not abs(square - expected) <= rounding:
                raise GramError(
                    f"gram: the mean gradient has squared norm {square:.6g}, the Gram gives {expected:.6g}: "
                    "the model or the batch is not what it was when the Gram was measured; take the mean "
                    "before they change"
                )
            unused = {name for name, check in self.coverage.items() if check.method == "unused"}
            self._means.update({name: None if name in unused else g[0] for name, g in means.items()})
        return self._means

    def noise_scales(self) -> dict[str, NoiseScale]:
        """Return the simple noise scale in samples, with its 95 % interval, of ``model`` and each layer.

        A jackknife over the N samples; a single sample has none. Layers need a Gram by layer.
        """
        if self.samples < 2:
            return {}
        layers = self.per_layer if self.detail in {"parameter", "layer"} else {}
        return {
            name: noise_scale(K.diagonal().cpu().numpy(), K.sum(1).cpu().numpy(), 1)
            for name, K in {"model": self.matrix, **layers}.items()
        }

    @property
    def per_parameter(self) -> dict[str, Tensor]:
        """Grams by parameter, float64 ``[N, N]`` each."""
        return self._grouped("parameter")

    @property
    def per_layer(self) -> dict[str, Tensor]:
        """Grams by module with parameters of its own; the outermost module is ``(root)``."""
        return self._grouped("layer")

    @property
    def per_block(self) -> dict[str, Tensor]:
        """Grams by block: ``blocks.3`` for ``blocks.3.attention.weight``, ``head`` for ``head.weight``."""
        return self._grouped("block")

    def _grouped(self, detail: str) -> dict[str, Tensor]:
        if DETAILS.index(detail) < DETAILS.index(self.detail):
            raise GramError(
                f"gram: Grams were kept by {self.detail}; ask for detail={detail!r} to have them by {detail}"
            )
        if detail == self.detail:
            return dict(self._matrices)
        members: dict[str, dict[str, Tensor]] = {}
        for location in self.locations.values():
            source = location.key(self.detail)
            members.setdefault(location.key(detail), {})[source] = self._matrices[source]
        return {key: _sum(matrices) for key, matrices in members.items()}

    def scope(self, name: str) -> Tensor:
        """Return the Gram of ``model``, ``block/…``, ``layer/…`` or ``parameter/…``.

        Raises
        ------
        GramError
            If there is no such scope.
        """
        if name == "model":
            return self.matrix
        detail, _, key = name.partition("/")
        grouped = self._grouped(detail) if detail in DETAILS[:3] else {}
        if key not in grouped:
            locations = self.locations.values() if detail in DETAILS else []
            names = ", ".join(dict.fromkeys(location.key(detail) for location in locations))
            raise GramError(
                f"gram: there is no scope {name!r}; there are: "
                f"{names or 'model, block/…, layer/…, parameter/…'}"
            )
        return grouped[key]

    def spectrum(
        self,
        *,
        centred: bool = False,
        scope: str = "model",
        top: int | None = None,
        device: torch.device | str | None = None,
    ) -> Spectrum:
        """Return the ``top`` eigenvalues (None: all) of the second moment A^T A / N, or of the covariance.

        ``scope`` is ``model``, ``block/…``, ``layer/…`` or ``parameter/…``; ``device`` that of the
        computation, None for that of the Gram.
        """
        return spectrum(self.scope(scope), centred=centred, top=top, device=device, input_eps=self.piece_eps)

    def eigenvectors(
        self, k: int, *, centred: bool = False, scope: str = "model"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the k leading eigenvalues, and their eigenvectors A^T v / sqrt(lambda) by parameter.

        The model is run once more; all vectors share one pass over the per-sample gradients, which is
        cheaper than a weighted backward for each. Orthonormality is checked, and fails if the parameters
        have changed since.

        ``k`` is their number; those whose eigenvalue is indistinguishable from 0 are left out. ``centred``
        takes those of the covariance, ``scope`` is that of :meth:`scope`.

        Returns
        -------
        tuple
            Eigenvalues float64 ``[r]``, and float64 ``[r, *shape]`` for each parameter of the scope; over
            all of them together, vectors have length 1.

        Raises
        ------
        GramError
            If vectors are not orthonormal, or the scope does not exist.
        """
        values, weights = eigenpairs(self.scope(scope), k, centred=centred)
        detail, _, key = scope.partition("/")
        members = [p.name for p in self.locations.values() if p.key(detail) == (key or "model")]
        directions = self._combine(dict.fromkeys(members, weights))
        product = torch.zeros(len(values), len(values), dtype=values.dtype, device=values.device)
        for vectors in directions.values():
            product += vectors.flatten(1) @ vectors.flatten(1).T
        product.diagonal().sub_(1)
        # An eigenvector to an eigenvalue near the rounding of gradients is as uncertain as that one.
        slack = 1e-6 + 64 * self.eps * float(values[0] / values[-1]) if len(values) else 1.0
        if len(values) and float(product.abs().max()) > slack:
            raise GramError(
                "gram: the eigenvectors are not orthonormal, so the model is not what it was when the Gram "
                "was measured; take them before the parameters or the batch change"
            )
        return values, directions


def _sum(matrices: Mapping[str, Tensor]) -> Tensor:
    values = list(matrices.values())
    total = values[0].clone()
    for matrix in values[1:]:
        total += matrix
    return total
