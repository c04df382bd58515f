"""``gram``: from a model, a loss and a batch to exact inner products of per-sample gradients.

One forward and one backward pass (docs/formulas.md, section 3); hooks pass the factors of each parameter to
the kernels while backward runs. Every parameter passes the checks of
:mod:`backlight.monitors.grokking.instrument.gram.checks`; one without a kernel, or whose check fails, is
measured by per-sample gradients instead and checked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import tensors
from backlight.capture.model_state import PreservedState, preserve_state
from backlight.capture.modules import unwrapped, walk
from backlight.capture.per_sample import Taps, gradients
from backlight.measure.gram.factors import Factors, coarsest_dtype, common_shape, compress, concatenate
from backlight.measure.gram.gram import combine, product_dtype
from backlight.measure.gram.gram import gram as gram_of_pieces
from backlight.measure.gram.layers import kernel_of
from backlight.monitors.grokking.instrument.gram import checks, inputs
from backlight.monitors.grokking.instrument.gram.checks import CheckSchedule, Coverage, GramError
from backlight.monitors.grokking.instrument.gram.fallback import per_sample
from backlight.monitors.grokking.instrument.gram.inputs import Measured, eager
from backlight.monitors.grokking.instrument.gram.result import DETAILS, Gram

LossFunction = Callable[[Any, Any], Tensor]


def gram(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
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
    return Measurement(model, loss_fn, batch, detail, fallback, kernel, products, at_once or 0).run()


@dataclass(eq=False)
class Measurement:
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
        self.rounding = torch.finfo(self.products or torch.float64).eps
        self.samples = inputs.count(self.batch)
        self.at_once = min(self.samples, self.at_once or self.samples)
        self.start, self.stop = 0, self.samples
        self.parameters = inputs.trainable(self.model)
        self.by_id = {id(p.tensor): p for p in self.parameters.values()}
        every = {id(module): module for _, module in walk(self.model)}.values()
        self.modules = [m for m in every if kernel_of(m) is not None and self._owned(m)]
        inputs.refuse_mixing(self.model)
        self.matrices: dict[str, Tensor] = {}
        self.pair: list[int] = []
        self.entries = torch.zeros(3, dtype=torch.int64)
        self.weights: Mapping[str, Tensor] | None = None
        self.combined: dict[str, Tensor] = {}
        self.random: list[Tensor] = []
        shapes = tuple((path, tensor.shape, tensor.dtype) for path, tensor in tensors(self.batch))
        self.schedule = CheckSchedule(self.model, self.loss_fn, shapes)

    def _owned(self, module: nn.Module) -> list[tuple[str, Measured]]:
        """Return the trainable parameters of ``module`` itself, by their names within it."""
        own = module._parameters.items()
        return [(key, self.by_id[id(p)]) for key, p in own if p is not None and id(p) in self.by_id]

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
        K, parameter.method = gram_of_pieces(pieces, kernel=self.kernel, products=self.products)
        if parameter.method == "chunked" and self.products is None:
            self.rounding = max(self.rounding, torch.finfo(product_dtype(pieces)).eps)
        parameter.eps = checks.epsilon(coarsest_dtype(pieces), K.device)
        parameter.summands = sum(piece.size() ** 2 for piece in pieces) ** 0.5
        self._keep(parameter, K)

    def _add_combination(self, parameter: Measured, pieces: list[Factors], start: int, stop: int) -> None:
        assert self.weights is not None
        name = parameter.location.name
        found = combine(pieces, self.weights[name][:, start:stop])
        found = found.reshape(-1, *parameter.tensor.shape)
        self.combined[name] = self.combined[name] + found if name in self.combined else found

    def _keep(self, parameter: Measured, K: Tensor) -> None:
        parameter.total, parameter.magnitude = float(K.sum()), float(torch.linalg.vector_norm(K, 1))
        if not self.pair:  # the samples with the largest gradients are the strongest test when run alone
            count = 2 if self.samples > 2 else 1
            self.pair = K.diagonal().topk(count).indices.sort().values.tolist()
            first, last = self.pair[0], self.pair[-1]
            n = self.samples
            self.entries = torch.tensor([first * n + first, first * n + last, last * n + last]).to(K.device)
        aa, ab, bb = K.take(self.entries).tolist()
        parameter.pair = aa, ab, bb
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
            found, without = self._pass()
            total = {name: _plus(total.get(name), gradient) for name, gradient in found.items()}
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

    def _pass(self) -> tuple[dict[str, Tensor | None], bool]:
        batch = self.batch
        if self.at_once < self.samples:
            batch = inputs.some(batch, torch.arange(self.start, self.stop))
        for parameter in self.parameters.values():
            parameter.expected, parameter.pieces = 0, []
        with (
            torch.enable_grad(),
            eager(self.model),
            Taps(self.modules, self.stop - self.start, self) as taps,
        ):
            loss = inputs.scalar(self.loss_fn(self.model, batch))
            found = self._gradients(loss, taps, batch)
        for parameter in self.parameters.values():
            if not parameter.uncaptured:
                self._finish(parameter)
        return found, taps.without_grad

    def _gradients(self, loss: Tensor, taps: Taps, batch: Any) -> dict[str, Tensor | None]:
        leaves = [p.tensor for p in self.parameters.values()]
        others = [t for _, t in tensors(batch) if t.requires_grad and t.is_leaf]
        return dict(zip(self.parameters, gradients(loss, leaves, taps, others=others), strict=True))

    def run(self) -> Gram:
        """Measure, check, and return the result; a GramError as in :func:`gram`."""
        if torch.is_inference_mode_enabled():
            raise GramError("gram: gradients cannot be taken in torch.inference_mode(); call it outside")
        with preserve_state(self.model) as state:
            self.random = state.states
            found, accumulated = self._sweep()
            drew = state.drew
            norms = _norms(found)
            failed = self._failures(norms)
            alone: dict[str, float] = {}
            mixed: dict[str, GramError] = {}
            if not drew and self.samples > 1 and self.schedule.due():
                alone = self._alone(state, accumulated)
                mixed = self._failures_alone(alone, failed)
            if failed or mixed:
                self._fall_back(failed | mixed, norms, alone, drew, state)
        if not mixed:  # a kernel that misread the samples of a parameter must not be trusted next time
            self.schedule.passed()
        coverage = {
            name: self._coverage(parameter, norms[name]) for name, parameter in self.parameters.items()
        }
        if alone:
            coverage = {
                name: replace(check, alone=(self._pair_norm(self.parameters[name]), alone[name]))
                for name, check in coverage.items()
            }
        # In model order, zeros for parameters that the loss does not depend on.
        device = next(iter(self.parameters.values())).tensor.device
        empty = torch.zeros(self.samples, self.samples, dtype=torch.float64, device=device)
        keys = dict.fromkeys(p.location.key(self.detail) for p in self.parameters.values())
        return Gram(
            samples=self.samples,
            detail=self.detail,
            locations={name: parameter.location for name, parameter in self.parameters.items()},
            coverage=coverage,
            mean_gradient={n: None if g is None else g.detach() / self.samples for n, g in found.items()},
            eps=max(parameter.eps for parameter in self.parameters.values()),
            rounding=self.rounding,
            _matrices={key: self.matrices.get(key, empty) for key in keys},
            _combine=self.combine,
        )

    def _coverage(self, parameter: Measured, norm: float) -> Coverage:
        return checks.coverage(
            parameter.method or "unused",
            parameter.total,
            parameter.magnitude,
            norm,
            parameter.summands,
            parameter.eps,
        )

    def _pair_norm(self, parameter: Measured) -> float:
        aa, ab, bb = parameter.pair
        return math.sqrt(max(0.0, aa + 2 * ab + bb if len(self.pair) == 2 else aa))

    def _failures(self, norms: Mapping[str, float]) -> dict[str, GramError]:
        failed = {}
        for name, parameter in self.parameters.items():
            check = self._coverage(parameter, norms[name])
            if parameter.uncaptured or not check.holds:
                failed[name] = checks.coverage_error(name, check, self.samples)
        return failed

    def _alone(self, state: PreservedState, accumulated: bool) -> dict[str, float]:
        """Return the norms of the gradients of the chosen samples, run without the others."""
        index = torch.tensor(self.pair or [0])
        some = inputs.some(self.batch, index)
        taps = Taps((), self.samples, self)
        taps.without_grad = accumulated
        with torch.enable_grad(), eager(self.model):
            try:
                loss = inputs.scalar(self.loss_fn(self.model, some))
            except GramError:
                raise
            except Exception as error:
                raise GramError(
                    f"gram: loss_fn fails on a batch of {len(index)} of the {self.samples} samples "
                    f"({type(error).__name__}: {error}); it must take any number of samples along the first "
                    "dimension"
                ) from error
            found = self._gradients(loss, taps, some)
        state.rewind()
        return _norms(found)

    def _failures_alone(
        self, alone: Mapping[str, float], known: Mapping[str, GramError]
    ) -> dict[str, GramError]:
        failed = {}
        for name, parameter in self.parameters.items():
            if name in known:
                continue
            norms = self._pair_norm(parameter), alone[name]
            aa, ab, bb = parameter.pair
            noise = checks.root_slack(aa + 2 * abs(ab) + bb, sum(norms))
            error = checks.independence_error(
                name,
                parameter.method or "unused",
                norms,
                256 * parameter.eps * parameter.summands + noise,
                parameter.eps,
                self.samples,
                len(self.pair),
            )
            if error is not None:
                failed[name] = error
        return failed

    def _fall_back(
        self,
        failed: Mapping[str, GramError],
        norms: Mapping[str, float],
        alone: Mapping[str, float],
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
            raise GramError(f"gram: parameter {first!r}: {why}{reason}; {way}")
        measured = [name for name in failed if self.parameters[name].method]
        if self.detail != "parameter" and measured:
            raise failed[measured[0]]
        wanted = {name: self.parameters[name].tensor for name in failed}
        state.rewind()
        with torch.enable_grad(), eager(self.model):
            for name, piece, method in per_sample(self.model, self.loss_fn, self.batch, wanted):
                parameter = self.parameters[name]
                K, _ = gram_of_pieces([piece])
                parameter.method = method
                parameter.summands = piece.size()
                # Passes of one sample take other kernels than that of all.
                parameter.eps = max(parameter.eps, 64 * checks.epsilon(piece.dtype, K.device))
                self._keep(parameter, K)
                check = self._coverage(parameter, norms[name])
                if not check.holds:
                    raise (
                        failed[name] if name in measured else checks.coverage_error(name, check, self.samples)
                    )
        if alone:
            for name, error in self._failures_alone(alone, {}).items():
                if name in wanted:
                    raise error

    def combine(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``sum_n weights[k, n] g_n`` for each named parameter, float64 ``[k, *shape]``."""
        self.weights, self.combined = weights, {}
        try:
            with preserve_state(self.model) as state:
                state.rewind(self.random)
                for parameter in self.parameters.values():
                    parameter.uncaptured = parameter.method if parameter.method in {"vmap", "loop"} else ""
                self._sweep()
                left = [p for p in self.parameters.values() if p.uncaptured and p.location.name in weights]
                wanted = {p.location.name: p.tensor for p in left}
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


def _norms(found: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the norm of each gradient, 0 where there is none, waiting for the device once."""
    dense = {
        name: gradient.coalesce().values() if gradient.is_sparse else gradient
        for name, gradient in found.items()
        if gradient is not None
    }
    norms = dict.fromkeys(found, 0.0)
    if dense:
        measured = torch._foreach_norm(
            list(dense.values()), 2, dtype=torch.float64
        )  # as clip_grad_norm_ does
        norms.update(zip(dense, torch.stack(list(measured)).tolist(), strict=True))
    return norms
