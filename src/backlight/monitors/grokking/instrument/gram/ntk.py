"""The empirical neural tangent kernel J J^T (Jacot et al., 1806.07572): the Gram of a network's outputs.

Each output is a sample of its own, so that the kernels and all checks of the Gram serve it. docs/formulas.md,
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import map_tensors
from backlight.capture.model_state import preserve_state
from backlight.capture.modules import unwrapped
from backlight.capture.per_sample import accumulated
from backlight.monitors.grokking.instrument.gram import inputs
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.gram_measurement import gram
from backlight.monitors.grokking.instrument.gram.inputs import eager

# The average gradient outer product with respect to the input, E[J^T J].
#
# J ``[c, d]`` is the Jacobian of a sample's outputs with respect to its input. Source: Radhakrishnan et al.,
# 2212.13881; for grokking, Mallinar et al., 2407.20199.


def input_agop(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return E[J^T J] over N samples, float64 ``[d, d]``, one backward for each output.

    The model is left as it was: gradients, buffers, training mode, random state. ``inputs`` are real
    ``[N, ...]``, d numbers to a sample.

    Raises
    ------
    GramError
        If inputs are not real, a parameter is sharded, or outputs do not have N rows that depend on inputs.
    """
    if not inputs.is_floating_point() or inputs.dim() < 2 or not inputs.shape[0]:
        raise GramError(
            f"agop: expected real inputs [N, ...] of at least one sample, got {list(inputs.shape)} of "
            f"{inputs.dtype}; of token ids take the embedded input"
        )
    sharded = next((name for name, p in model.named_parameters() if hasattr(p, "placements")), None)
    if sharded is not None:
        raise GramError(
            f"agop: parameter {sharded!r} is sharded over processes (DTensor), so that every process would "
            "have to take the same passes; have a watch gather it: grokking={'gather': True}"
        )
    n = inputs.shape[0]
    x = inputs.detach().clone().requires_grad_()
    model = unwrapped(model)
    with preserve_state(model), torch.enable_grad(), eager(model):
        outputs = _outputs(model, x)
        total = x.new_zeros(x[0].numel(), x[0].numel(), dtype=torch.float64)
        parameters = [p for p in model.parameters() if p.requires_grad]
        reentrant = False
        for c in range(outputs.shape[1]):
            gradient = None
            if not reentrant:
                retain = c + 1 < outputs.shape[1]
                try:
                    (gradient,) = torch.autograd.grad(
                        outputs[:, c].sum(), x, retain_graph=retain, allow_unused=True
                    )
                except RuntimeError:
                    reentrant = True  # or something else, which then fails again
            if reentrant:
                # Re-entrant checkpointing knows only backward, and each backward uses its graph up.
                (gradient,) = accumulated(_outputs(model, x)[:, c].sum(), [x], others=parameters)
            if gradient is None:
                raise GramError("agop: the outputs do not depend on the inputs")
            rows = gradient.reshape(n, -1).double()
            total.addmm_(rows.T, rows)
    return total / n


def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    if out.shape[:1] != x.shape[:1] or not out.requires_grad:
        raise GramError(
            f"agop: expected outputs [{len(x)}, ...] that depend on the inputs, got {list(out.shape)}"
        )
    return out.reshape(len(x), -1)


@dataclass(frozen=True)
class TangentKernel:
    """The empirical neural tangent kernel of ``samples`` N inputs and ``outputs`` C of the network.

    ``kernel`` is float64 ``[N, C, N, C]``, the inner products of gradients of single outputs.
    """

    kernel: Tensor

    @property
    def samples(self) -> int:
        """N."""
        return self.kernel.shape[0]

    @property
    def outputs(self) -> int:
        """C."""
        return self.kernel.shape[1]

    @property
    def matrix(self) -> Tensor:
        """The kernel as float64 ``[N C, N C]``, outputs of a sample together."""
        size = self.samples * self.outputs
        return self.kernel.reshape(size, size)

    def alignment(self, targets: Tensor) -> float:
        """Return ``y^T K y / (|K| |y|^2)``, between 0 and 1, for targets ``[N, C]`` centred over samples.

        1 where the kernel is that of the targets alone (Cristianini et al. 2001); NaN where either is 0.

        Raises
        ------
        GramError
            If the targets have another shape.
        """
        if targets.shape != (self.samples, self.outputs):
            raise GramError(
                f"ntk: targets must have shape {[self.samples, self.outputs]}, got {list(targets.shape)}"
            )
        y = targets.to(self.kernel)
        y = (y - y.mean(0)).flatten()
        norms = float(self.matrix.norm() * (y @ y))
        return float(y @ self.matrix @ y) / norms if norms else math.nan

    def distance(self, other: TangentKernel) -> float:
        """Return ``1 - <K, K'> / (|K| |K'|)``, 0 for kernels that are equal up to a factor.

        Source: Fort et al., 2010.15110.

        Raises
        ------
        GramError
            If the other is of other samples or outputs.
        """
        if other.kernel.shape != self.kernel.shape:
            raise GramError(
                f"ntk: kernels of {list(self.kernel.shape)} and {list(other.kernel.shape)} have no distance"
            )
        norms = float(self.matrix.norm() * other.matrix.norm())
        product = float((self.matrix * other.matrix.to(self.matrix)).sum())
        return max(1 - product / norms, 0.0) if norms else math.nan


def ntk(
    model: nn.Module,
    batch: Any,
    *,
    outputs: Callable[[Any, Any], Tensor] = lambda model, batch: model(batch),
    **settings: Any,
) -> TangentKernel:
    """Measure the empirical neural tangent kernel exactly, without forming the Jacobian.

    Parameters
    ----------
    model
        As in :func:`backlight.gram`.
    batch
        Inputs with N samples along the first dimension.
    outputs
        ``outputs(model, batch)`` returns ``[N, ...]``, C numbers for each sample. Cost grows with C.
    **settings
        ``kernel``, ``products``, ``at_once`` and ``fallback`` of :func:`backlight.gram`.

    Returns
    -------
    TangentKernel

    Raises
    ------
    GramError
        As :func:`backlight.gram`.
    """
    n = inputs.count(batch)
    with preserve_state(model), torch.no_grad():
        shown = outputs(model, batch)
    if not isinstance(shown, Tensor) or shown.ndim == 0 or len(shown) != n:
        got = list(shown.shape) if isinstance(shown, Tensor) else type(shown).__name__
        raise GramError(f"ntk: outputs(model, batch) must return a tensor with {n} samples first, got {got}")
    c = shown[0].numel()
    chosen = torch.eye(c, dtype=shown.dtype, device=shown.device).repeat(n, 1)
    every = map_tensors(batch, lambda x: x.repeat_interleave(c, 0))

    def summed(model: nn.Module, inputs: Any) -> Tensor:
        inner, which = inputs
        total: Tensor = (outputs(model, inner).flatten(1) * which).sum()
        return total

    kernel = gram(model, summed, (every, chosen), detail="model", **settings)
    return TangentKernel(kernel.matrix.reshape(n, c, n, c))
