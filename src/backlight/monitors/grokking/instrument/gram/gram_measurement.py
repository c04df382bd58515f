"""``gram``: from a model, a loss and a batch to exact inner products of per-sample gradients.

One forward and one backward pass (docs/formulas.md, section 3); hooks pass the factors of each parameter to
the kernels while backward runs. Every parameter passes the checks of
:mod:`backlight.monitors.grokking.instrument.gram.checks`; one without a kernel, or whose check fails, is
measured by per-sample gradients instead and checked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import tensors_in
from backlight.capture.model_state import PreservedState, preserve_state
from backlight.capture.modules import unwrapped, walk
from backlight.capture.per_sample import Call, Taps, gradients
from backlight.interrupts import is_interrupt
from backlight.measure.gram.factors import Factors, coarsest_dtype, common_shape, compress, concatenate, sizes
from backlight.measure.gram.gram import combine
from backlight.measure.gram.gram import gram as gram_of_pieces
from backlight.measure.gram.layers import kernel_of
from backlight.monitors.grokking.instrument.gram import checks, inputs
from backlight.monitors.grokking.instrument.gram.checks import CheckSchedule, GramCoverage, GramError
from backlight.monitors.grokking.instrument.gram.fallback import per_sample
from backlight.monitors.grokking.instrument.gram.independence import Independence, Sets
from backlight.monitors.grokking.instrument.gram.inputs import ALONE, Measured, eager
from backlight.monitors.grokking.instrument.gram.result import DETAILS, Gram
from backlight.monitors.grokking.instrument.gram.sample_interaction import Coupling

PREFIX = "gram: parameter {!r}: "
"""How the error of a parameter begins."""

LossFunction = Callable[[Any, Any], Tensor]


def gram(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    against: Any = None,
    detail: str = "parameter",
    fallback: bool = True,
    kernel: str = "auto",
    products: torch.dtype | None = None,
    at_once: int | None = None,
) -> Gram:
    """Measure the exact Gram of per-sample gradients without forming them.

    Parameters
    ----------
    model
        Any module. It is left unchanged: parameters, ``.grad``, buffers, training mode, random state.
    loss_fn
        ``loss_fn(model, batch)`` returns the sum of the losses of the samples, a scalar. The sample unit is
        whatever lies along the first dimension: an image, a sequence, a token.
    batch
        Tensors, or tuples, lists and dicts of them, with N samples along the first dimension of each.
    against
        A second batch, whose samples follow those of the first: ``cross`` of the result is one against the
        other, and ``influence`` how much a step on a sample of the first lowers the loss of the second.
    detail
        How finely Grams are kept: by ``parameter``, ``layer``, ``block``, or only for the ``model``.
        Checks are made by parameter in any case.
    fallback
        Whether parameters without a kernel are measured by ``torch.func.vmap``, at the memory of their
        per-sample gradients; if not, they are refused by name.
    kernel
        ``auto``, ``ghost`` or ``chunked``.
    products
        None for the type of the model where per-sample gradients have to be formed, in runs of 64 whose
        sums go on in float64, and float64 elsewhere: of float32 models, eigenvalues below about 1e-7 of
        the largest may be lost. ``torch.float64`` keeps them, at half the speed where gradients are
        formed; ``torch.float32`` multiplies everything in float32.
    at_once
        How many samples go through the model in one pass; None for all. Fewer need the memory of a
        forward and backward pass of so many only, and that of inputs and output gradients, or of
        per-sample gradients where these are smaller, of all samples.

    Returns
    -------
    Gram

    Raises
    ------
    GramError
        If a parameter fails its check or has no kernel, samples are not independent along the first
        dimension, or the arguments do not fit.
    """
    if detail not in DETAILS:
        raise GramError(f"gram: detail must be one of {', '.join(DETAILS)}, got {detail!r}")
    if kernel not in {"auto", "ghost", "chunked"}:
        raise GramError(f"gram: kernel must be auto, ghost or chunked, got {kernel!r}")
    if products not in {None, torch.float64, torch.float32}:
        raise GramError(f"gram: products must be None, torch.float64 or torch.float32, got {products}")
    if at_once is not None and at_once < 1:
        raise GramError(f"gram: at_once must be at least 1, got {at_once}")
    batch, others = (batch, 0) if against is None else inputs.joined(batch, against)
    measurement = GramMeasurement(model, loss_fn, batch, detail, fallback, kernel, products, at_once or 0)
    return replace(measurement.run(), against=others)


@dataclass(eq=False)
class GramMeasurement:
    """One measurement, with the arguments of :func:`gram`; the result keeps it to compute eigenvectors."""

    model: nn.Module
    loss_fn: LossFunction
    batch: Any
    detail: str
    fallback: bool
    kernel: str
    products: torch.dtype | None
    at_once: int

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise GramError(f"gram: model must be a torch.nn.Module, got {type(self.model).__name__}")
        self.model = unwrapped(self.model)
        self.samples = inputs.count(self.batch)
        self.at_once = min(self.samples, self.at_once or self.samples)
        self.start, self.stop = 0, self.samples
        self.parameters = inputs.trainable(self.model)
        self.by_id = {id(p.tensor): p for p in self.parameters.values()}
        self.state: PreservedState | None = None
        self.full = True  # whether this measurement is checked
        every = {id(module): module for _, module in walk(self.model)}.values()
        self.modules = [m for m in every if kernel_of(m) is not None and self._owned(m)]
        served = {parameter.location.name for m in self.modules for _, parameter in self._owned(m)}
        self.bare = set(self.parameters) - served  # no kernel can take these
        inputs.refuse_mixing(self.model)
        self.weights: Mapping[str, Tensor] | None = None
        self.combined: dict[str, Tensor] = {}
        self.random: list[Tensor] = []
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(self.batch))
        self.schedule = CheckSchedule(self.model, self.loss_fn, (self.at_once, shapes))
        self.history = self.schedule.history
        self._reset()

    def _reset(self) -> None:
        """Forget what a sweep measured."""
        self.rounding = torch.finfo(self.products or torch.float64).eps
        self.matrices: dict[str, Tensor] = {}
        self.sets: Sets | None = None
        self.loss = 0.0
        self.calls: list[tuple[Call, ...]] = []
        self.broadcasts = False
        for parameter in self.parameters.values():
            parameter.forget()
            parameter.uncaptured = self.history.uncaptured.get(parameter.location.name, "")

    def _owned(self, module: nn.Module) -> list[tuple[str, Measured]]:
        """Return the trainable parameters of ``module`` itself, by their names within it."""
        parameters = module._parameters.items()
        return [(key, self.by_id[id(p)]) for key, p in parameters if p is not None and id(p) in self.by_id]

    # Called by the capture (``Taps``).

    def expect(self, module: nn.Module) -> None:
        """Count a use of each parameter of ``module``."""
        for _, parameter in self._owned(module):
            parameter.expected += 1

    def skip(self, module: nn.Module, reason: str) -> None:
        """Note that a use of the parameters of ``module`` cannot be separated by samples."""
        for _, parameter in self._owned(module):
            parameter.uncaptured = reason

    def take(self, module: nn.Module, x: Tensor, delta: Tensor) -> None:
        """Compute the factors of a call, and the Gram of each parameter whose last use it was."""
        layer = kernel_of(module)
        assert layer is not None
        pieces = layer(module, x, delta, self.stop - self.start)
        for key, parameter in self._owned(module):
            if parameter.uncaptured or (
                self.weights is not None and parameter.location.name not in self.weights
            ):
                continue
            if key not in pieces:  # of weight norm, an adapter
                parameter.uncaptured = f"a {type(module).__name__} does not use it in its forward"
                continue
            parameter.pieces.append(pieces[key])
            if len(parameter.pieces) == parameter.expected:
                self._finish(parameter)

    def _finish(self, parameter: Measured) -> None:
        pieces, parameter.pieces = parameter.pieces, []
        if not pieces:
            return
        try:
            common_shape(pieces)
        except ValueError as error:
            parameter.uncaptured = str(error)
            return
        if self.weights is not None:
            self._add_combination(parameter, pieces, self.start, self.stop)
        elif self.at_once == self.samples:
            self._measure(parameter, pieces)
        else:
            parameter.parts.append(compress(pieces))

    def _measure(self, parameter: Measured, pieces: list[Factors]) -> None:
        K, parameter.method, kind = gram_of_pieces(pieces, kernel=self.kernel, products=self.products)
        self.rounding = max(self.rounding, torch.finfo(kind).eps)
        parameter.eps = checks.epsilon(coarsest_dtype(pieces), K.device)
        self._keep(parameter, K, pieces)

    def _add_combination(self, parameter: Measured, pieces: list[Factors], start: int, stop: int) -> None:
        assert self.weights is not None
        name = parameter.location.name
        combined = combine(pieces, self.weights[name][:, start:stop])
        combined = combined.reshape(-1, *parameter.tensor.shape)
        self.combined[name] = self.combined[name] + combined if name in self.combined else combined

    def _keep(self, parameter: Measured, K: Tensor, pieces: Sequence[Factors]) -> None:
        if self.full:
            parameter.sizes = sizes(pieces).to("cpu", torch.float64)
            checked = [K.sum(), torch.linalg.vector_norm(K, 1)]
            if parameter.method not in ALONE and self.samples > 1:
                self.sets = self.sets or Sets.of(K, self.history.checked)
                rows = self.sets.pairs().to(K.device)
                checked += (rows @ K @ rows.T).flatten()
            parameter.total, parameter.magnitude, *entries = torch.stack(checked).tolist()
            side = math.isqrt(len(entries))
            parameter.entries = torch.tensor(entries, dtype=torch.float64).view(side, side)
        key = parameter.location.key(self.detail)
        if self.detail != "parameter" and key in self.matrices:
            self.matrices[key] += K
        else:
            self.matrices[key] = K

    # The passes.

    def _sweep(self) -> tuple[dict[str, Tensor | None], bool]:
        """Run forward and backward; return gradients by parameter, and whether ``backward()`` was needed."""
        total: dict[str, Tensor | None] = {}
        accumulated = False
        for start in range(0, self.samples, self.at_once):
            self.start, self.stop = start, min(self.samples, start + self.at_once)
            if start:  # a forward pass may change them, as spectral norm does
                self._restore_buffers()
            gradients, without = self._pass()
            total = {name: _plus(total.get(name), gradient) for name, gradient in gradients.items()}
            accumulated |= without
        for parameter in self.parameters.values():
            parts, parameter.parts = parameter.parts, []
            if not parts or parameter.uncaptured:
                continue
            try:
                if sum(piece.samples for part in parts for piece in part[:1]) != self.samples:
                    raise ValueError("it is not used by every sample")
                self._measure(parameter, concatenate(parts))
            except ValueError as error:
                parameter.uncaptured = str(error)
        return total, accumulated

    def _restore_buffers(self) -> None:
        if self.state is not None:
            self.state.restore_buffers()

    def _pass(self) -> tuple[dict[str, Tensor | None], bool]:
        batch = self.batch
        if self.at_once < self.samples:
            batch = inputs.some(batch, torch.arange(self.start, self.stop))
        for parameter in self.parameters.values():
            parameter.expected, parameter.pieces = 0, []
        size, history = self.stop - self.start, self.history
        taps = Taps(self.modules, size, self, sample_calls=history.sample_calls, broadcast=history.broadcast)
        try:
            with torch.enable_grad(), eager(self.model), taps:
                loss = inputs.scalar(self.loss_fn(self.model, batch))
                gradients = self._gradients(loss, taps, batch)
        finally:
            self.broadcasts |= taps.broadcasts
        self.loss += float(loss.detach()) if self.full and taps.broadcasts else 0.0
        self.calls.append(tuple(taps.calls))
        for parameter in self.parameters.values():
            if not parameter.uncaptured:
                self._finish(parameter)
        return gradients, taps.without_grad

    def _gradients(self, loss: Tensor, taps: Taps, batch: Any) -> dict[str, Tensor | None]:
        wanted = {
            name: p.tensor
            for name, p in self.parameters.items()
            if self.full or taps.without_grad or name in self.bare or p.uncaptured
        }
        others = [t for t in tensors_in(batch) if t.requires_grad and t.is_leaf]
        return dict(zip(wanted, gradients(loss, list(wanted.values()), taps, others=others), strict=True))

    def run(self) -> Gram:
        """Measure, check, and return the result; a GramError as in :func:`gram`."""
        if torch.is_inference_mode_enabled():
            raise GramError("gram: gradients cannot be taken in torch.inference_mode(); call it outside")
        with preserve_state(self.model) as state:
            self.random, self.state = state.states, state
            self.full = self.schedule.due()
            while (gradients := self._measured(state)) is None:
                state.rewind()
                self._reset()
        self.schedule.passed()
        # In model order, zeros for parameters that the loss does not depend on.
        device = next(iter(self.parameters.values())).tensor.device
        empty = torch.zeros(self.samples, self.samples, dtype=torch.float64, device=device)
        keys = dict.fromkeys(p.location.key(self.detail) for p in self.parameters.values())
        norms = inputs.norms(gradients)
        return Gram(
            samples=self.samples,
            detail=self.detail,
            locations={name: parameter.location for name, parameter in self.parameters.items()},
            coverage={
                name: self._coverage(parameter, norms.get(name))
                for name, parameter in self.parameters.items()
            },
            unchecked=self.history.unchecked,
            eps=max(parameter.eps for parameter in self.parameters.values()),
            rounding=self.rounding,
            _matrices={key: self.matrices.get(key, empty) for key in keys},
            _combine=self.combine,
            _means={n: None if g is None else g.detach() / self.samples for n, g in gradients.items()}
            if self.full
            else {},
        )

    def _measured(self, state: PreservedState) -> dict[str, Tensor | None] | None:
        """Measure and check once; return the gradients, or None if it has to be done again otherwise."""
        history = self.history
        if self.full:
            history.sample_calls = self._calls_of_one(state)
        try:
            gradients, accumulated = self._sweep()
        except GramError:
            raise
        except Exception as error:
            if is_interrupt(error):
                raise
            if not (self.broadcasts and history.broadcast):
                raise
            history.broadcast = False
            return None
        calls = hash(tuple(self.calls))
        if not self.full and calls != history.calls:
            self.full = True
            return None
        drew = state.drew
        failed = self._failures(inputs.norms(gradients))
        if self.full:
            if self.broadcasts and history.broadcast and not self._same_loss(state):
                history.broadcast = False
                return None
            if drew:
                Coupling(self, state).refuse()
            if not failed or not drew:
                failed |= Independence(self, state, drew, accumulated).failures(gradients, set(failed))
        measured = [name for name in failed if self.parameters[name].method]
        if self.detail != "parameter" and measured and self.fallback and not drew:
            # Their Grams are in the sum of a layer: measure again, without their kernels.
            history.uncaptured |= {name: str(failed[name]) for name in measured}
            return None
        if failed:
            self._fall_back(failed, gradients, drew, state)
        history.uncaptured |= {name: str(error) for name, error in failed.items() if name not in self.bare}
        history.calls = calls
        return gradients

    def _calls_of_one(self, state: PreservedState) -> list[Call]:
        """Return the calls of modules in a forward pass of one sample; none where that fails."""
        taps = Taps(self.modules, 1, None)
        try:
            with torch.enable_grad(), eager(self.model), taps:
                self.loss_fn(self.model, inputs.some(self.batch, torch.tensor([0])))
        except Exception as error:
            if is_interrupt(error):
                raise
            return []
        finally:
            state.rewind()
        return taps.calls

    def _same_loss(self, state: PreservedState) -> bool:
        """Return whether the loss is what it is without outputs that were broadcast."""
        state.rewind()
        total = 0.0
        with torch.enable_grad(), eager(self.model):  # re-entrant checkpointing warns without gradients
            for index in torch.arange(self.samples).split(self.at_once):  # type: ignore[no-untyped-call]
                total += float(self.loss_fn(self.model, inputs.some(self.batch, index)).detach())
        state.rewind()
        coarse = max(parameter.eps for parameter in self.parameters.values()) > 1e-4
        return abs(total - self.loss) <= (0.05 if coarse else 1e-3) * max(abs(total), abs(self.loss))

    def _coverage(self, parameter: Measured, norm: float | None) -> GramCoverage:
        method = parameter.method or "unused"
        if norm is None or not self.full:
            return GramCoverage(method)
        size = float(torch.linalg.vector_norm(parameter.sizes))
        coverage = checks.coverage(method, parameter.total, parameter.magnitude, norm, size, parameter.eps)
        return replace(coverage, independence=parameter.independence)

    def _failures(self, norms: Mapping[str, float]) -> dict[str, GramError]:
        failed = {}
        for name, norm in norms.items():
            parameter = self.parameters[name]
            check = self._coverage(parameter, norm)
            unmeasured = not parameter.method and norm > 0
            if parameter.uncaptured or unmeasured or check.holds is False:
                failed[name] = checks.coverage_error(name, check, self.samples)
        return failed

    def alone(self, index: Tensor, accumulated: bool) -> tuple[dict[str, Tensor | None], list[Call]]:
        """Return gradients of samples ``index [n]`` run without the others, and the calls of modules."""
        total: dict[str, Tensor | None] = {}
        calls: list[Call] = []
        for part in index.split(self.at_once):  # type: ignore[no-untyped-call]
            some = inputs.some(self.batch, part)
            with torch.enable_grad(), eager(self.model), Taps(self.modules, len(part), None) as taps:
                loss = inputs.scalar(self.loss_fn(self.model, some))
                taps.without_grad = accumulated
                gradients = self._gradients(loss, taps, some)
            calls += taps.calls
            total = {name: _plus(total.get(name), gradient) for name, gradient in gradients.items()}
        return total, calls

    def _fall_back(
        self,
        failed: Mapping[str, GramError],
        gradients: Mapping[str, Tensor | None],
        drew: bool,
        state: PreservedState,
    ) -> None:
        first = next(iter(failed))
        if not self.fallback or drew:
            parameter = self.parameters[first]
            why = str(failed[first]) if parameter.method else "no kernel knows how it is used"
            way = (
                "the forward pass draws random numbers, so that per-sample gradients cannot be taken one by "
                "one; call model.eval(), or set dropout to 0"
                if drew
                else "allow fallback=True"
            )
            reason = f" ({parameter.uncaptured})" if parameter.uncaptured else ""
            raise GramError(
                f"gram: parameter {first!r}: {why.removeprefix(PREFIX.format(first))}{reason}; {way}"
            )
        wanted = {name: self.parameters[name].tensor for name in failed}
        norms = inputs.norms(gradients)
        state.rewind()
        with torch.enable_grad(), eager(self.model):
            for name, piece, method in per_sample(self.model, self.loss_fn, self.batch, wanted):
                parameter = self.parameters[name]
                before = parameter.method
                K, _, _ = gram_of_pieces([piece])
                parameter.method = method
                # Passes of one sample take other kernels than that of all.
                parameter.eps = max(parameter.eps, 64 * checks.epsilon(piece.dtype, K.device))
                parameter.independence, summed = None, parameter.sizes
                self._keep(parameter, K, [piece])
                parameter.sizes = torch.maximum(parameter.sizes, summed)  # kernels know what cancels
                check = self._coverage(parameter, norms[name])
                if check.holds is False:
                    raise failed[name] if before else checks.coverage_error(name, check, self.samples)

    def combine(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``sum_n weights[k, n] g_n`` for each named parameter, float64 ``[k, *shape]``."""
        methods = {name: parameter.method for name, parameter in self.parameters.items()}
        with preserve_state(self.model) as self.state:
            self.state.rewind(self.random)
            for name, parameter in self.parameters.items():
                parameter.uncaptured = methods[name] if methods[name] in ALONE else ""
            return self.combined_now(weights)

    def combined_now(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the same for the model and the random state as they are."""
        self.weights, self.combined, self.full = weights, {}, False
        try:
            self._sweep()
            left = [p for p in self.parameters.values() if p.uncaptured and p.location.name in weights]
            wanted = {p.location.name: p.tensor for p in left}
            self._restore_buffers()
            with torch.enable_grad(), eager(self.model):
                for name, piece, _ in per_sample(self.model, self.loss_fn, self.batch, wanted):
                    self._add_combination(self.parameters[name], [piece], 0, self.samples)
        finally:
            self.weights = None
        rows = next(iter(weights.values())).shape[0]
        return {
            name: self.combined[name]
            if name in self.combined
            else weights[name].new_zeros(rows, *self.parameters[name].tensor.shape)
            for name in weights
        }


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
