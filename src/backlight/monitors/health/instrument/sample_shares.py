"""The samples of a step that carry its gradient: what ``samples_of_step`` computes and a run stores.

A sample's share is ``<g_n, G> / |G|^2``: its contribution ``g_n`` to the gradient ``G`` of the step along
that gradient. Over all samples, forward passes and ranks shares add up to 1. What the norm would be without
some samples, ``|G - sum g_n|``, says whether they are the cause. docs/formulas.md, section 3.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backlight.capture.batches import map_tensors, tensors_in
from backlight.capture.loss_graph import single_losses
from backlight.capture.modules import walk
from backlight.capture.per_sample import Call, Taps, gradients
from backlight.capture.step_inputs import ForwardCall
from backlight.devices import set_random_states
from backlight.interrupts import is_interrupt
from backlight.measure.gram.factors import Factors, VectorFactors, lengths, projections
from backlight.measure.gram.gram import gram
from backlight.measure.gram.layers import kernel_of

# A forward pass of a step, computed again with the gradients that its outputs had.
#
# Its kernels give the Gram of what each sample contributed to the gradient of the step, and the inner
# products of these contributions with that gradient. Where a parameter has no kernel, one backward per sample
# does.

MAX_SAMPLES = 4096
"""Samples of a forward pass beyond which it is not decomposed: their Gram has as many squared entries."""

ONE_BY_ONE_S = 30.0
"""Seconds that backward passes of single samples may take."""

COVERED = 1e-3
"""Largest relative error of the Gram of a parameter, against its replayed gradient."""


@dataclass
class Decomposed:
    """What the samples of one forward pass contributed to the gradient of the step.

    N samples lie along the first dimension of the inputs, or the second. ``gram`` is float64 ``[N, N]`` over
    the covered parameters, ``products [N]`` are those of contributions with the gradient of the step, and
    ``positions [N, T]`` the part of them that belongs to positions of a sequence, None without one.
    ``replayed`` holds the gradient of this pass by the ``id`` of a parameter; ``uncovered`` are names.
    """

    samples: int
    gram: Tensor
    products: Tensor
    positions: Tensor | None
    replayed: dict[int, Tensor]
    uncovered: list[str]
    losses: Tensor | None
    copies: list[int] = field(default_factory=list)  # the first sample that is equal to each
    bad_inputs: list[int] = field(default_factory=list)


class ReplayError(RuntimeError):
    """A forward pass that cannot be computed again; the message says why."""


@dataclass(eq=False)
class _Parameter:
    name: str
    tensor: nn.Parameter
    gradient: Tensor
    expected: int = 0
    pieces: list[Factors] = field(default_factory=list)
    gram: Tensor | None = None
    products: list[Tensor] = field(default_factory=list)
    skipped: bool = False


class Replay:
    """Replays one call and takes the factors of its modules; ``gradients`` of the step are by ``id``."""

    def __init__(
        self, call: ForwardCall, gradients: Mapping[int, Tensor], names: Mapping[int, str], scale: float
    ) -> None:
        self._call, self._scale = call, scale
        if call.trouble or call.is_gone():
            raise ReplayError(call.trouble or "its module, or what that was given, is gone")
        if not call.deltas:
            raise ReplayError("no gradient reached its outputs")
        if call.was_changed():
            raise ReplayError("its inputs were changed in place after it")
        inputs = [x for x in call.inputs() if x.dim()]
        if not inputs:
            raise ReplayError("its inputs hold no tensor with samples")
        shape = inputs[0].shape
        indices = None if call.indices is None else len(call.indices)
        self.samples = (
            shape[1] if indices is not None and indices != shape[0] and indices in shape[1:2] else shape[0]
        )
        if self.samples > MAX_SAMPLES:
            raise ReplayError(f"it has {self.samples} samples, more than {MAX_SAMPLES}")
        is_sequence = inputs[0].dim() == 2 and not inputs[0].is_floating_point()
        self._positions = shape[1] if is_sequence and self.samples == shape[0] else 0
        self._parameters: dict[int, _Parameter] = {}
        parameters = (p for _, module in walk(call.module) for p in module._parameters.values())
        for p in parameters:
            if p is not None and p.requires_grad and id(p) in gradients:
                gradient = gradients[id(p)]
                self._parameters[id(p)] = _Parameter(names.get(id(p), ""), p, gradient)

    # Called by the capture (``Taps``).

    def _owned(self, module: nn.Module) -> list[tuple[str, _Parameter]]:
        params = module._parameters.items()
        return [
            (key, self._parameters[id(p)]) for key, p in params if p is not None and id(p) in self._parameters
        ]

    def expect(self, module: nn.Module) -> None:
        """Count a use of each parameter of ``module``."""
        for _, parameter in self._owned(module):
            parameter.expected += 1

    def skip(self, module: nn.Module, reason: str) -> None:
        """Note that a use cannot be separated by samples."""
        for _, parameter in self._owned(module):
            parameter.skipped = True

    def take(self, module: nn.Module, x: Tensor, delta: Tensor) -> None:
        """Measure each parameter whose last use this was."""
        layer = kernel_of(module)
        assert layer is not None
        pieces = layer(module, x, delta, self.samples)
        for key, parameter in self._owned(module):
            if key not in pieces or parameter.skipped:
                parameter.skipped = True
                continue
            parameter.pieces.append(pieces[key])
            if len(parameter.pieces) == parameter.expected:
                self._measure(parameter)

    def _measure(self, parameter: _Parameter) -> None:
        pieces, parameter.pieces = parameter.pieces, []
        if not pieces or parameter.skipped:
            return
        try:
            parameter.gram = gram(pieces)[0]
        except ValueError:  # its uses differ
            parameter.skipped = True
            return
        parameter.products = projections(pieces, parameter.gradient)

    # The passes.

    def _forward(self, call: ForwardCall, args: Any, kwargs: Any) -> list[Tensor]:
        set_random_states(call.devices, call.random)
        enabled, dtype = call.autocast
        device = next((x.device.type for x in call.inputs()), "cpu")
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            result = call.module(*args, **kwargs)
        return tensors_in(result)

    def _arguments(self) -> tuple[Any, Any]:
        return tuple(map_tensors(list(self._call.args), Tensor.detach)), map_tensors(
            dict(self._call.kwargs), Tensor.detach
        )

    def _calls_of_one(self, modules: Sequence[nn.Module]) -> list[Call]:
        """Return the calls of modules in a forward pass of one sample; none where that fails."""
        args, kwargs = (
            map_tensors(argument, lambda x: x[:1] if len(x) == self.samples else x)
            for argument in self._arguments()
        )
        modes = [(module, module.training) for module in self._call.module.modules()]
        try:
            with Taps(modules, 1, None) as taps:
                self._forward(self._call, args, kwargs)
        except Exception as error:
            if is_interrupt(error):
                raise
            return []
        finally:
            for module, training in modes:
                module.training = training
        return taps.calls

    def _surrogate(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the number whose gradient with respect to the outputs is the one that they had."""
        deltas = self._call.deltas
        if max(deltas) >= len(outputs) or any(outputs[i].shape != d.shape for i, d in deltas.items()):
            raise ReplayError("it returned outputs of other shapes when it was computed again")
        return sum((outputs[i] * d).sum() for i, d in deltas.items())  # type: ignore[return-value]

    def run(self) -> Decomposed:
        """Compute the pass again and return what each sample contributed."""
        every = {id(module): module for _, module in walk(self._call.module)}.values()
        modules = [m for m in every if kernel_of(m) is not None and self._owned(m)]
        sample_calls = self._calls_of_one(modules)
        try:
            outputs, by_key = self._swept(modules, sample_calls, broadcast=True)
        except Exception as error:
            if is_interrupt(error):
                raise
            for p in self._parameters.values():
                p.expected, p.pieces, p.gram, p.products, p.skipped = 0, [], None, [], False
            outputs, by_key = self._swept(modules, sample_calls, broadcast=False)
        replayed = {key: g * self._scale for key, g in by_key.items()}
        for p in self._parameters.values():
            if p.gram is not None and not _covers(p.gram, by_key.get(id(p.tensor))):
                p.gram = None
        self._one_by_one([p for p in self._parameters.values() if p.gram is None and id(p.tensor) in by_key])
        return self._joined(outputs, replayed)

    def _swept(
        self, modules: Sequence[nn.Module], sample_calls: Sequence[Call], *, broadcast: bool
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        leaves = [p.tensor for p in self._parameters.values()]
        taps = Taps(modules, self.samples, self, sample_calls=sample_calls, broadcast=broadcast)
        with taps, torch.enable_grad():  # gradients are collected where clipping has switched them off
            args, kwargs = self._arguments()
            outputs = self._forward(self._call, args, kwargs)
            self._losses = self._own_losses(outputs)
            leaf_grads = gradients(self._surrogate(outputs), leaves, taps)
        for parameter in self._parameters.values():
            self._measure(parameter)
        kept = zip(leaves, leaf_grads, strict=True)
        return outputs, {id(p): (g.to_dense() if g.is_sparse else g) for p, g in kept if g is not None}

    def _own_losses(self, outputs: Sequence[Tensor]) -> Tensor | None:
        """Return the losses of samples of a model that returns its loss, else those of the step."""
        for i in self._call.deltas:
            if outputs[i].numel() == 1 and (losses := single_losses(outputs[i].grad_fn)) is not None:
                return losses
        return self._call.losses

    def _one_by_one(self, left: Sequence[_Parameter]) -> None:
        """Measure parameters without a kernel by a backward for each sample's rows of the outputs."""
        deltas, n = self._call.deltas, self.samples
        if not left or any(d.dim() == 0 or len(d) % n for d in deltas.values()):
            return
        args, kwargs = self._arguments()
        outputs = self._forward(self._call, args, kwargs)
        leaves = [p.tensor for p in left]
        rows = [p.tensor.new_zeros(n, p.tensor.numel()) for p in left]
        begin = time.monotonic()
        for i in range(n):
            if time.monotonic() - begin > ONE_BY_ONE_S:
                return
            outputs_of = {key: _only(d, i, n) for key, d in deltas.items()}
            grads = torch.autograd.grad(
                [outputs[key] for key in outputs_of], leaves, list(outputs_of.values()),
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
            for row, g in zip(rows, grads, strict=True):
                if g is not None:
                    row[i] = g.flatten()
        for p, row in zip(left, rows, strict=True):
            piece = VectorFactors(row, lambda row=row: lengths(row), row.dtype)  # type: ignore[misc]
            p.gram, p.products = gram([piece])[0], projections([piece], p.gradient)

    def _joined(self, outputs: Sequence[Tensor], replayed: dict[int, Tensor]) -> Decomposed:
        n, scale = self.samples, self._scale
        K, products = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        positions = torch.zeros(n, self._positions, dtype=torch.float64) if self._positions > 1 else None
        for p in self._parameters.values():
            if p.gram is None:
                continue
            K += p.gram.cpu()
            for part in p.products:
                products += part.sum(1).cpu()
                if positions is not None and part.shape[1] == self._positions:
                    positions += part.cpu()
        uncovered = [p.name for p in self._parameters.values() if p.gram is None and id(p.tensor) in replayed]
        losses = self._losses
        if losses is not None:
            losses = losses.reshape(n, -1).double().mean(1).cpu() if losses.numel() % n == 0 else None
        inputs = [x for x in self._call.inputs() if x.dim() and len(x) == n]
        floats = [x.detach().reshape(n, -1) for x in inputs if x.is_floating_point()]
        bad = sum((~x.isfinite()).any(1).int() for x in floats).nonzero() if floats else []  # type: ignore[union-attr]
        return Decomposed(
            n,
            K * scale**2,
            products * scale,
            None if positions is None else positions * scale,
            replayed,
            uncovered,
            losses,
            _copies(inputs, n),
            [int(i) for i in bad],
        )


def _only(delta: Tensor, sample: int, samples: int) -> Tensor:
    """Return a gradient of outputs with the rows of one sample only."""
    frames = len(delta) // samples
    kept = torch.zeros_like(delta)
    rows = slice(sample * frames, (sample + 1) * frames)
    kept[rows] = delta[rows]
    return kept


def _covers(K: Tensor, gradient: Tensor | None) -> bool:
    """Return whether the sum of a Gram is the squared norm of the gradient; True where not finite."""
    square = 0.0 if gradient is None else float(gradient.double().square().sum())
    total, size = float(K.sum()), float(K.diagonal().sum())
    if not math.isfinite(square):
        return True
    return abs(total - square) <= COVERED * (square + COVERED * size)


def _copies(inputs: Sequence[Tensor], samples: int) -> list[int]:
    """Return, for each sample, the first one whose inputs are the same."""
    firsts: dict[bytes, int] = {}
    out = []
    for n in range(samples):
        parts = [x[n].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in inputs]
        out.append(firsts.setdefault(b"|".join(p.numpy().tobytes() for p in parts), n))
    return out


LISTED = 16
"""Samples of a forward pass that are listed, those with the largest shares."""

WINDOW_SHARE = 0.8
"""Part of a sample's share that the shortest run of positions is to hold."""

COMMUNICATES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Namespaces of the operators of torch that communicate."""

REPLAYED = 1e-2
"""Largest relative difference of the replayed gradient from that of the step."""


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Refuses communication: other ranks do not compute the pass again, and would never answer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator that stays on this rank."""
        if func.namespace in COMMUNICATES:
            raise ReplayError("its forward pass communicates with other ranks, which do not compute it again")
        return func(*args, **(kwargs or {}))


def samples_of_step(
    calls: Sequence[ForwardCall],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    names: Sequence[str],
    *,
    scale: float,
    loss_scale: float,
    world_size: int,
) -> dict[str, Any]:
    """Decompose the gradient of a step by its samples.

    ``gradients`` are those of ``parameters`` when the step collects them, and contain the factor ``scale``;
    the gradients of outputs contain ``loss_scale``. Over several ranks a gradient is taken for the mean of
    theirs.

    Returns
    -------
    dict
        What JSON carries: ``total`` norm, ``covered`` part of its square, ``difference`` of the replayed
        gradient (None on several ranks), ``calls`` of the forward passes with their samples, ``reason`` why
        there are none.
    """
    kept = {
        id(p): (g.to_dense() if g.is_sparse else g).detach() / scale
        for p, g in zip(parameters, gradients, strict=True)
        if g is not None
    }
    named = {id(p): name for p, name in zip(parameters, names, strict=True)}
    decomposed: list[tuple[int, ForwardCall, Decomposed]] = []
    reasons: list[str] = []
    for number, call in enumerate(calls):
        try:
            with _alone_of(world_size):
                replay = Replay(call, kept, named, 1 / (loss_scale * world_size))
                decomposed.append((number, call, replay.run()))
        except ReplayError as error:
            reasons.append(str(error))
        except Exception as error:
            if is_interrupt(error):
                raise
            reasons.append(f"{type(error).__name__}: {error}".split("\n")[0])
    total = sum(float(g.double().square().sum()) for g in kept.values())
    out: dict[str, Any] = {
        "total": _plain(math.sqrt(total)) if total >= 0 else None,
        "calls": [],
        "reason": "; ".join(dict.fromkeys(reasons)),
    }
    if not decomposed:
        out["reason"] = out["reason"] or "no forward pass of the step was observed"
        return out
    uncovered = {name for _, _, replay in decomposed for name in replay.uncovered}
    wanted = {key for key in kept if named[key] not in uncovered}
    covered = sum(float(kept[key].double().square().sum()) for key in wanted)
    is_finite = math.isfinite(total)
    out |= {
        "covered": covered / total if is_finite and total else None,
        "uncovered": sorted(uncovered)[:LISTED],
        "difference": _difference(decomposed, kept, total) if world_size == 1 and is_finite else None,
    }
    if (out["difference"] or 0.0) > REPLAYED:
        out["reason"] = (
            f"the forward passes give another gradient when they are computed again "
            f"(relative difference {out['difference']:.2g})"
        )
        return out
    out["calls"] = [_described(number, call, replay, covered) for number, call, replay in decomposed]
    return out


def _alone_of(world_size: int) -> contextlib.AbstractContextManager[Any]:
    return NoCollectives() if world_size > 1 else contextlib.nullcontext()  # type: ignore[no-untyped-call]


def _difference(
    replays: Sequence[tuple[int, ForwardCall, Decomposed]], kept: Mapping[int, Tensor], total: float
) -> float:
    """Return the norm of what the replayed gradients lack, relative to that of the step."""
    away = 0.0
    for key, gradient in kept.items():
        replayed = sum(replay.replayed[key].double() for _, _, replay in replays if key in replay.replayed)
        away += float((gradient.double() - replayed).square().sum())
    return math.sqrt(away / total) if total else 0.0


def _described(number: int, call: ForwardCall, decomposed: Decomposed, covered: float) -> dict[str, Any]:
    norms = decomposed.gram.diagonal().clamp(min=0).sqrt().numpy()
    indices = call.indices if call.indices is not None and len(call.indices) == decomposed.samples else None
    bad = np.flatnonzero(~np.isfinite(norms)).tolist()
    out: dict[str, Any] = {
        "number": number,
        "module": type(call.module).__name__,
        "samples": decomposed.samples,
        "batch": call.batch,
        "indices": None if indices is None else list(indices),
        "is_row": call.indices is not None and indices is None,
        "distinct": len(set(decomposed.copies)),
        "non_finite": bad[:LISTED],
        "non_finite_count": len(bad),
        "bad_inputs": decomposed.bad_inputs[:LISTED],
        "median_norm": _plain(float(np.median(norms))),
        "median_loss": None if decomposed.losses is None else _plain(float(decomposed.losses.median())),
        "top": [],
        "highest": _highest(decomposed.losses, indices),
        "share": None,
    }
    if bad or not (covered > 0 and math.isfinite(covered)):
        return out
    shares = (decomposed.products / covered).numpy()
    firsts = np.array(decomposed.copies)
    units = sorted(dict.fromkeys(decomposed.copies), key=lambda f: -shares[firsts == f].sum())[:LISTED]
    chosen = np.zeros(decomposed.samples, dtype=bool)
    K = decomposed.gram.numpy()
    for first in units:
        members = firsts == first
        chosen |= members
        left = covered * (1 - 2 * shares[chosen].sum()) + K[np.ix_(chosen, chosen)].sum()
        out["top"].append(
            {
                "sample": int(first),
                "index": None if indices is None else int(indices[first]),
                "copies": int(members.sum()),
                "norm": _plain(float(norms[first])),
                "share": float(shares[members].sum()),
                "loss": None if decomposed.losses is None else _plain(float(decomposed.losses[first])),
                "without": math.sqrt(max(0.0, left)),  # the norm without it and those before it
                **_window(decomposed.positions, int(first)),
            }
        )
    out["share"] = float(shares.sum())
    return out


def _highest(losses: Tensor | None, indices: Sequence[int] | None) -> list[dict[str, Any]]:
    """Return the samples with the highest losses, each with the mean loss without it and those before it."""
    if losses is None or not bool(losses.isfinite().all()):
        return []
    out, left, count = [], float(losses.sum()), len(losses)
    for n in losses.topk(min(LISTED, count - 1)).indices.tolist():
        left, count = left - float(losses[n]), count - 1
        index = None if indices is None else int(indices[n])
        out.append({"sample": n, "index": index, "loss": float(losses[n]), "without": left / count})
    return out


def _window(positions: Tensor | None, sample: int) -> dict[str, int | float]:
    """Return the shortest run of positions that holds most of a sample's share; nothing without positions."""
    if positions is None:
        return {}
    sums = np.concatenate([[0.0], np.cumsum(positions[sample].numpy())])
    total = sums[-1]
    if not total > 0:
        return {}
    length = len(sums) - 1
    for size in range(1, length + 1):
        window_sums = sums[size:] - sums[:-size]
        if window_sums.max() >= WINDOW_SHARE * total:
            first = int(window_sums.argmax())
            return {
                "first": first,
                "last": first + size - 1,
                "positions": length,
                "held": float(window_sums.max() / total),
            }
    return {}


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
