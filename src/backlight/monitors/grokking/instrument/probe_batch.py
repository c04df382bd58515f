"""Measurements of the per-sample gradients of a probe batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import tensors_in
from backlight.capture.model_state import preserve_state
from backlight.capture.modules import unwrapped
from backlight.measure.gram.eigenvalues import spectrum
from backlight.measure.noise_scale import noise_scale
from backlight.monitors.grokking.instrument.gradient_history import record_array
from backlight.monitors.grokking.instrument.gram import inputs
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.gram_measurement import gram
from backlight.monitors.grokking.instrument.gram.ntk import TangentKernel, input_agop, ntk
from backlight.monitors.grokking.model.measures import finite

if TYPE_CHECKING:
    from backlight.monitor import Recorder
    from backlight.monitors.grokking.instrument.gram.result import Gram
    from backlight.monitors.grokking.settings import Measures


SHOWN = 16
"""Held-out samples whose own influences are recorded: the first ones."""


def influences(
    model: nn.Module,
    sample_loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    held_out: Any,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Tensor:
    """Return how much each of N samples lowers each of M held-out losses in one step, float64 ``[N, M]``.

    ``<g_n, D g'_m> / N``, with the gradients ``g'_m`` of the held-out samples and the learning rates D of the
    optimizers: to first order the sum over n is the drop in a step of gradient descent on the mean loss of
    the batch. docs/formulas.md, section 3.

    Raises
    ------
    GramError
        If no optimizer holds a parameter of the model, or as :func:`backlight.gram`.
    """
    rates = {
        id(parameter): float(group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    trainable = inputs.trainable(unwrapped(model))
    of = {name: rates[id(p.tensor)] for name, p in trainable.items() if id(p.tensor) in rates}
    if not of:
        raise GramError(
            "influence: no optimizer holds a parameter of the model, so no learning rate is known"
        )
    is_one = len(of) == len(trainable) and len(set(of.values())) == 1
    kernel = gram(model, sample_loss, batch, against=held_out, detail="model" if is_one else "parameter")
    total = (
        next(iter(of.values())) * kernel.cross()
        if is_one
        else torch.stack([rate * kernel.cross(f"parameter/{name}") for name, rate in of.items()]).sum(0)
    )
    return total / len(total)


def record_influences(
    step: int,
    model: nn.Module,
    sample_loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    held_out: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    recorder: Recorder,
    *,
    arrays: bool,
) -> None:
    """Record sums of the influences by sign, the mean held-out loss, and with ``arrays`` the influences.

    These are ``[N]`` on the mean held-out loss, and ``[N, M]`` on those of the first :data:`SHOWN` samples.
    """
    pairs = influences(model, sample_loss, batch, held_out, optimizers).cpu()
    on_mean = pairs.mean(1)
    with preserve_state(model), torch.no_grad():
        loss = float(sample_loss(model, held_out)) / inputs.count(held_out)
    values = {
        "drop": float(on_mean.sum()),
        "lowering": float(on_mean.clamp(min=0).sum()),
        "raising": float(on_mean.clamp(max=0).sum()),
        "held_out_loss": loss,
    }
    recorder.scalars(step, {f"influence/{name}": value for name, value in values.items()})
    if arrays:
        record_array(recorder, "influence/samples", step, on_mean, ("sample",))
        record_array(recorder, "influence/pairs", step, pairs[:, :SHOWN].float(), ("sample", "held_out"))


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
        x, *others = tensors_in(batch)
        with preserve_state(model), torch.no_grad():
            shown = model(x[:1])
        if not isinstance(shown, Tensor):
            raise GramError(f"ntk: the model must return a tensor, got {type(shown).__name__}")
        outputs = shown.numel()
        n = min(inputs.count(batch), ROWS // outputs)
        if n < 2:
            raise GramError(f"ntk: a sample has {outputs} outputs, expected {ROWS // 2} at most")
        kernel = ntk(model, x[:n])
        values = {"trace": float(kernel.matrix.trace()) / n}
        if others and (targets := _targets(others[0][:n], outputs)) is not None:
            values["alignment"] = kernel.alignment(targets)
        if self.start is None:
            self.start = kernel.kernel.cpu()
        values["distance"] = kernel.distance(TangentKernel(self.start))
        recorder.scalars(step, {f"ntk/{name}": value for name, value in finite(values).items()})


def _targets(labels: Tensor, outputs: int) -> Tensor | None:
    """Return targets ``[N, C]`` of class numbers or of numbers; None where they are neither."""
    if labels.dim() == 1 and not labels.is_floating_point() and int(labels.max()) < outputs > 1:
        return nn.functional.one_hot(labels.long(), outputs)
    return labels.reshape(len(labels), -1) if labels[:1].numel() == outputs else None


class ProbedModel:
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
        measured = gram(
            self._model, self._sample_loss, self._next_batch(), detail="layer", products=torch.float64
        )
        if measured.unchecked and not self._reported:
            self._reported = True
            what = "independence of the samples of the probe batch"
            recorder.event(step, "unmeasured", {"what": what, "reason": measured.unchecked})
        if due["gram"]:
            _record_grams(step, measured, measures, recorder)
        if due["mean_gradient"]:
            for name, gradient in measured.mean_gradient.items():
                if gradient is not None:
                    record_array(recorder, f"mean_gradient/{name}", step, gradient.detach().cpu())
        if due["vectors"]:
            _record_eigenvectors(step, measured, measures, recorder)

    def agop(self, step: int, measures: Measures, recorder: Recorder) -> None:
        """Record the input AGOP if it is due and the input is real-valued."""
        inputs = self._inputs(self._next_batch()) if measures.due(measures.agop, step) else None
        if inputs is None:
            return
        matrix = input_agop(self._model, inputs)
        # ``spectrum`` takes N times a second moment.
        eigen = spectrum(matrix * len(matrix), device=_eigenvalue_device(measures))
        metrics = finite(eigen.metrics(of_samples=False))
        recorder.scalars(step, {f"agop/{name}": value for name, value in metrics.items()})
        if measures.matrices:
            record_array(recorder, "agop/matrix", step, matrix.cpu(), ("input", "input"))
        if measures.spectra:
            record_array(recorder, "agop/eigenvalues", step, eigen.eigenvalues, ("rank",))

    def influence(self, step: int, measures: Measures, recorder: Recorder) -> None:
        """Record which samples carry the drop of the held-out loss, if that is due."""
        if self._held_out is not None and measures.due(measures.influence, step):
            pair = self._next_batch(), self._held_out, self._optimizers()
            record_influences(step, self._model, self._sample_loss, *pair, recorder, arrays=measures.spectra)
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


def scopes(grams: Gram, wanted: str) -> dict[str, Tensor]:
    """Return the Grams of a scope by name; a block of a single layer appears as that layer only."""
    layers = {f"layer/{name}": matrix for name, matrix in grams.per_layer.items()}
    if wanted == "layers":
        return layers
    members: dict[str, set[str]] = {}
    for location in grams.locations.values():
        members.setdefault(location.block, set()).add(location.layer)
    blocks = {f"block/{name}": matrix for name, matrix in grams.per_block.items() if len(members[name]) > 1}
    return {"model": grams.matrix, **blocks, **layers}


def _record_grams(step: int, grams: Gram, measures: Measures, recorder: Recorder) -> None:
    device = _eigenvalue_device(measures)
    for scope, matrix in scopes(grams, measures.scope).items():
        whole = grams.spectrum(scope=scope, device=device)
        centred = grams.spectrum(scope=scope, centred=True, device=device)
        values = {f"gram/{scope}/{name}": value for name, value in finite(whole.metrics()).items()}
        values |= {f"gram/{scope}/centred/{name}": v for name, v in finite(centred.metrics()).items()}
        if grams.samples > 1:
            low, high = noise_scale(matrix.diagonal().cpu().numpy(), matrix.sum(1).cpu().numpy(), 1).interval
            values |= finite({f"gram/{scope}/noise_scale_low": low, f"gram/{scope}/noise_scale_high": high})
        recorder.scalars(step, values)
        if measures.spectra:
            record_array(recorder, f"gram/{scope}/eigenvalues", step, whole.eigenvalues, ("rank",))
            record_array(recorder, f"gram/{scope}/centred_eigenvalues", step, centred.eigenvalues, ("rank",))
        if measures.matrices:
            record_array(recorder, f"gram/{scope}/matrix", step, matrix.cpu(), ("sample", "sample"))


def _record_eigenvectors(step: int, grams: Gram, measures: Measures, recorder: Recorder) -> None:
    """Record the leading eigenvectors of the model, ``[r, M]`` in model order."""
    _, vectors = grams.eigenvectors(min(measures.top_k, grams.samples))
    flat = torch.cat([part.flatten(1) for part in vectors.values()], dim=1)
    precise = torch.float64 if measures.precision == "float64" else torch.float32
    record_array(recorder, "gram/model/vectors", step, flat.to("cpu", precise), ("rank", "parameter"))


def _eigenvalue_device(measures: Measures) -> torch.device | None:
    return torch.device("cpu") if measures.eigenvalues == "host" else None
