"""The empirical neural tangent kernel of a probe batch over a run: alignment, and distance from its start."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import tensors
from backlight.capture.model_state import preserve_state
from backlight.monitors.grokking.instrument.gram import inputs
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.ntk import TangentKernel, ntk
from backlight.monitors.grokking.model.measures import finite

if TYPE_CHECKING:
    from backlight.monitor import Recorder

ROWS = 1024
"""Most rows of a kernel, samples times outputs: it is held for as long as the run lasts."""


def existing(reference: weakref.ref[nn.Module]) -> nn.Module:
    """Return a model; GramError where the script has dropped it."""
    model = reference()
    if model is None:
        raise GramError("the model does not exist any more")
    return model


class KernelSeries:
    """Measures the kernel of the first samples of a batch, whose first tensor is the input of the model.

    ``start`` is the kernel of the first measurement, None before it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._reference = weakref.ref(model)
        self.start: Tensor | None = None

    def measure(self, step: int, batch: Any, recorder: Recorder) -> None:
        """Record trace, alignment with the labels, and distance from the start.

        Raises
        ------
        GramError
            If the samples have too many outputs, or as :func:`backlight.ntk`.
        """
        model = existing(self._reference)
        x, *others = [tensor for _, tensor in tensors(batch)]
        with preserve_state(model), torch.no_grad():
            shown = model(x[:1])
        if not isinstance(shown, Tensor):
            raise GramError(f"ntk: the model must return a tensor, got {type(shown).__name__}")
        outputs = shown.numel()
        n = min(inputs.count(batch), ROWS // outputs)
        if n < 2:
            raise GramError(f"ntk: a sample has {outputs} outputs, expected {ROWS // 2} at most")
        found = ntk(model, x[:n])
        values = {"trace": float(found.matrix.trace()) / n}
        if others and (targets := _targets(others[0][:n], outputs)) is not None:
            values["alignment"] = found.alignment(targets)
        if self.start is None:
            self.start = found.kernel.cpu()
        values["distance"] = found.distance(TangentKernel(self.start))
        recorder.scalars(step, {f"ntk/{name}": value for name, value in finite(values).items()})


def _targets(labels: Tensor, outputs: int) -> Tensor | None:
    """Return targets ``[N, C]`` of class numbers or of numbers; None where they are neither."""
    if labels.dim() == 1 and not labels.is_floating_point() and int(labels.max()) < outputs > 1:
        return nn.functional.one_hot(labels.long(), outputs)
    return labels.reshape(len(labels), -1) if labels[:1].numel() == outputs else None
