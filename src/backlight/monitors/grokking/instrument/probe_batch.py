"""Measurements of the per-sample gradients of a probe batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backlight.measure.gram.eigenvalues import spectrum
from backlight.measure.noise_scale import noise_scale
from backlight.monitors.grokking.instrument.gradient_history import record_array
from backlight.monitors.grokking.instrument.gram.agop import input_agop
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.gram import gram
from backlight.monitors.grokking.instrument.influence import record_influences
from backlight.monitors.grokking.instrument.kernel_series import KernelSeries, existing
from backlight.monitors.grokking.model.measures import finite

if TYPE_CHECKING:
    from backlight.monitor import Recorder
    from backlight.monitors.grokking.instrument.gram.result import Gram
    from backlight.monitors.grokking.settings import Measures


class Probe:
    """A model with its per-sample loss and a probe batch.

    ``sample_loss(model, batch)`` is summed over the samples along the first dimension. ``batch`` may be a
    callable that returns one for each measurement. ``inputs`` returns the real-valued input of a batch, for
    the AGOP; None if there is none. ``held_out`` is a batch of other samples, None without; the learning
    rates of what ``optimizers`` returns weigh the influence on its loss.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_loss: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        inputs: Callable[[Any], Tensor | None] = lambda _batch: None,
        *,
        held_out: Any = None,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]] = tuple,
    ) -> None:
        self._reference = weakref.ref(model)
        self._sample_loss = sample_loss
        self._batch = batch
        self._inputs = inputs
        self._held_out, self._optimizers = held_out, optimizers
        self.kernels = KernelSeries(model)
        self._reported = False  # that independence is not checked
        self._announced = False  # whether the samples of influences are always the same

    @property
    def _model(self) -> nn.Module:
        """The model; GramError where the script has dropped it."""
        return existing(self._reference)

    def measure(self, step: int, measures: Measures, recorder: Recorder) -> None:
        """Record what is due at ``step`` for the current weights."""
        due = {
            name: measures.due(getattr(measures, name), step) for name in ("mean_gradient", "gram", "vectors")
        }
        if not any(due.values()):
            return
        # float64 products keep the smallest eigenvalues, which a later analysis of the stored Gram may need.
        found = gram(
            self._model, self._sample_loss, self._next_batch(), detail="layer", products=torch.float64
        )
        if found.unchecked and not self._reported:
            self._reported = True
            what = "independence of the samples of the probe batch"
            recorder.event(step, "unmeasured", {"what": what, "reason": found.unchecked})
        if due["gram"]:
            _record_grams(step, found, measures, recorder)
        if due["mean_gradient"]:
            for name, gradient in found.mean_gradient.items():
                if gradient is not None:
                    record_array(recorder, f"mean_gradient/{name}", step, gradient.detach().cpu())
        if due["vectors"]:
            _record_eigenvectors(step, found, measures, recorder)

    def agop(self, step: int, measures: Measures, recorder: Recorder) -> None:
        """Record the input AGOP if it is due and the input is real-valued."""
        inputs = self._inputs(self._next_batch()) if measures.due(measures.agop, step) else None
        if inputs is None:
            return
        matrix = input_agop(self._model, inputs)
        # ``spectrum`` takes N times a second moment.
        found = spectrum(matrix * len(matrix), device=_eigenvalue_device(measures))
        metrics = finite(found.metrics(of_samples=False))
        recorder.scalars(step, {f"agop/{name}": value for name, value in metrics.items()})
        if measures.matrices:
            record_array(recorder, "agop/matrix", step, matrix.cpu(), ("input", "input"))
        if measures.spectra:
            record_array(recorder, "agop/eigenvalues", step, found.eigenvalues, ("rank",))

    def influence(self, step: int, measures: Measures, recorder: Recorder) -> None:
        """Record which samples carry the drop of the held-out loss, if that is due."""
        if self._held_out is not None and measures.due(measures.influence, step):
            given = self._next_batch(), self._held_out, self._optimizers()
            record_influences(step, self._model, self._sample_loss, *given, recorder, arrays=measures.spectra)
            if not self._announced:
                self._announced = True
                recorder.event(step, "influence", {"is_fixed": not callable(self._batch)})

    def ntk(self, step: int, measures: Measures, recorder: Recorder) -> None:
        """Record the neural tangent kernel of a fixed batch if it is due."""
        if measures.due(measures.ntk, step):
            if callable(self._batch):
                raise GramError("ntk: a probe batch that changes has no distance from its start")
            self.kernels.measure(step, self._batch, recorder)

    def _next_batch(self) -> Any:
        return self._batch() if callable(self._batch) else self._batch


def scopes(found: Gram, wanted: str) -> dict[str, Tensor]:
    """Return the Grams of a scope by name; a block of a single layer appears as that layer only."""
    layers = {f"layer/{name}": matrix for name, matrix in found.per_layer.items()}
    if wanted == "layers":
        return layers
    members: dict[str, set[str]] = {}
    for location in found.locations.values():
        members.setdefault(location.block, set()).add(location.layer)
    blocks = {f"block/{name}": matrix for name, matrix in found.per_block.items() if len(members[name]) > 1}
    return {"model": found.matrix, **blocks, **layers}


def _record_grams(step: int, found: Gram, measures: Measures, recorder: Recorder) -> None:
    device = _eigenvalue_device(measures)
    for scope, matrix in scopes(found, measures.scope).items():
        whole = found.spectrum(scope=scope, device=device)
        centred = found.spectrum(scope=scope, centred=True, device=device)
        values = {f"gram/{scope}/{name}": value for name, value in finite(whole.metrics()).items()}
        values |= {f"gram/{scope}/centred/{name}": v for name, v in finite(centred.metrics()).items()}
        if found.samples > 1:
            low, high = noise_scale(matrix.diagonal().cpu().numpy(), matrix.sum(1).cpu().numpy(), 1).interval
            values |= finite({f"gram/{scope}/noise_scale_low": low, f"gram/{scope}/noise_scale_high": high})
        recorder.scalars(step, values)
        if measures.spectra:
            record_array(recorder, f"gram/{scope}/eigenvalues", step, whole.eigenvalues, ("rank",))
            record_array(recorder, f"gram/{scope}/centred_eigenvalues", step, centred.eigenvalues, ("rank",))
        if measures.matrices:
            record_array(recorder, f"gram/{scope}/matrix", step, matrix.cpu(), ("sample", "sample"))


def _record_eigenvectors(step: int, found: Gram, measures: Measures, recorder: Recorder) -> None:
    """Record the leading eigenvectors of the model, ``[r, M]`` in model order."""
    _, vectors = found.eigenvectors(min(measures.top_k, found.samples))
    flat = torch.cat([part.flatten(1) for part in vectors.values()], dim=1)
    precise = torch.float64 if measures.precision == "float64" else torch.float32
    record_array(recorder, "gram/model/vectors", step, flat.to("cpu", precise), ("rank", "parameter"))


def _eigenvalue_device(measures: Measures) -> torch.device | None:
    return torch.device("cpu") if measures.eigenvalues == "host" else None
