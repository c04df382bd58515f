"""What is measured of the per-sample gradients of a fixed probe batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backlight.measure.gram.eigenvalues import spectrum
from backlight.monitors.grokking.instrument.gram.agop import input_agop
from backlight.monitors.grokking.instrument.gram.gram import gram
from backlight.monitors.grokking.model.spectrum_fields import finite

if TYPE_CHECKING:
    from backlight.monitors.grokking.instrument.gram.result import Gram
    from backlight.monitors.grokking.instrument.tracker import Sink
    from backlight.monitors.grokking.model.measures import Measures

Put = Callable[[str, int, Any, tuple[str, ...]], None]


class Probe:
    """A model with its per-sample loss and a probe batch.

    Parameters
    ----------
    sample_loss:
        ``sample_loss(model, batch)``, summed over the samples along the first dimension.
    batch:
        The probe batch, or a callable that gives one for each measurement.
    inputs:
        Real-valued input of a batch, for the AGOP; None where it has none.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_loss: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        inputs: Callable[[Any], Tensor | None] = lambda _batch: None,
    ) -> None:
        self._model = model
        self._sample_loss = sample_loss
        self._batch = batch
        self._inputs = inputs

    def measure(self, step: int, measures: Measures, sink: Sink, put: Put) -> None:
        """Measure what is due at ``step``, with the weights as they are.

        Raises
        ------
        GramError
            If a parameter fails its coverage gate, or has no kernel.
        """
        due = {
            name: measures.due(getattr(measures, name), step) for name in ("mean_gradient", "gram", "vectors")
        }
        if not any(due.values()):
            return
        # What is stored is to hold whatever is asked of it later, the smallest eigenvalues as well.
        found = gram(self._model, self._sample_loss, self._given(), detail="layer", products=torch.float64)
        if due["gram"]:
            self._spectra(step, found, measures, sink, put)
        if due["mean_gradient"]:
            for name, gradient in found.mean_gradient.items():
                if gradient is not None:
                    put(f"mean_gradient/{name}", step, gradient.detach().cpu(), ())
        if due["vectors"]:
            _vectors(step, found, measures, put)

    def agop(self, step: int, measures: Measures, sink: Sink, put: Put) -> None:
        """Measure the input AGOP, where it is due and the input is real-valued.

        Raises
        ------
        GramError
            If the model cannot be called with the input alone.
        """
        inputs = self._inputs(self._given()) if measures.due(measures.agop, step) else None
        if inputs is None:
            return
        matrix = input_agop(self._model, inputs)
        device = torch.device("cpu") if measures.eigenvalues == "host" else None
        # The spectrum of a second moment K / N, with N K in place of K.
        found = spectrum(matrix * len(matrix), device=device)
        told = finite(found.metrics())
        sink.scalars(step, {f"agop/{k}": v for k, v in told.items() if k not in {"coherence", "noise_scale"}})
        if measures.matrices:
            put("agop/matrix", step, matrix.cpu(), ("input", "input"))
        if measures.spectra:
            put("agop/eigenvalues", step, found.eigenvalues, ("rank",))

    def _given(self) -> Any:
        return self._batch() if callable(self._batch) else self._batch

    def _spectra(self, step: int, found: Gram, measures: Measures, sink: Sink, put: Put) -> None:
        device = torch.device("cpu") if measures.eigenvalues == "host" else None
        for scope, matrix in scopes(found, measures.scope).items():
            whole = found.spectrum(scope=scope, device=device)
            centred = found.spectrum(scope=scope, centred=True, device=device)
            told = {f"gram/{scope}/{name}": value for name, value in finite(whole.metrics()).items()}
            told |= {f"gram/{scope}/centred/{name}": v for name, v in finite(centred.metrics()).items()}
            sink.scalars(step, told)
            if measures.spectra:
                put(f"gram/{scope}/eigenvalues", step, whole.eigenvalues, ("rank",))
                put(f"gram/{scope}/centred_eigenvalues", step, centred.eigenvalues, ("rank",))
            if measures.matrices:
                put(f"gram/{scope}/matrix", step, matrix.cpu(), ("sample", "sample"))


def scopes(found: Gram, wanted: str) -> dict[str, Tensor]:
    """Return the Grams of a scope by name; a block that is a single layer is told as that layer alone."""
    layers = {f"layer/{name}": matrix for name, matrix in found.per_layer.items()}
    if wanted == "layers":
        return layers
    members: dict[str, set[str]] = {}
    for place in found.places.values():
        members.setdefault(place.block, set()).add(place.layer)
    blocks = {f"block/{name}": matrix for name, matrix in found.per_block.items() if len(members[name]) > 1}
    return {"model": found.matrix, **blocks, **layers}


def _vectors(step: int, found: Gram, measures: Measures, put: Put) -> None:
    """Store the leading eigenvectors of the model, ``[r, M]`` in model order, and their eigenvalues."""
    _, vectors = found.eigenvectors(min(measures.top_k, found.samples))
    flat = torch.cat([part.flatten(1) for part in vectors.values()], dim=1)
    precise = torch.float64 if measures.precision == "float64" else torch.float32
    put("gram/model/vectors", step, flat.to("cpu", precise), ("rank", "parameter"))
