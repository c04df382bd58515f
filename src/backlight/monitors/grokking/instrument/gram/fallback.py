"""Per-sample gradients of parameters without a kernel: by ``vmap``, or a loop where that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import map_tensors, tensors_in
from backlight.interrupts import is_interrupt
from backlight.measure.gram.factors import VectorFactors, lengths
from backlight.monitors.grokking.instrument.gram import inputs

GROUP_BYTES = 256 << 20
"""Bytes of per-sample gradients that are held at once; one parameter may need more."""


class _Loss(nn.Module):
    """The loss of one sample as a module, so that parameters can be replaced by name."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> Tensor:
        return self.loss_fn(self.model, batch).reshape(())


def per_sample(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    parameters: Mapping[str, nn.Parameter],
) -> Iterator[tuple[str, VectorFactors, str]]:
    """Yield name, per-sample gradients ``[N, M_p]`` as a piece, and ``vmap`` or ``loop``.

    Parameters are taken in groups whose gradients fit into :data:`GROUP_BYTES`, each with a pass of its own.
    """
    n = inputs.count(batch)
    groups: list[dict[str, nn.Parameter]] = []
    group_bytes = GROUP_BYTES
    for name, parameter in parameters.items():
        group_bytes += n * parameter.nbytes
        if group_bytes > GROUP_BYTES:
            groups.append({})
            group_bytes = n * parameter.nbytes
        groups[-1][name] = parameter
    for group in groups:
        try:
            gradients_of, method = _vmapped(model, loss_fn, batch, group), "vmap"
        except Exception as error:
            if is_interrupt(error):
                raise
            gradients_of, method = _looped(model, loss_fn, batch, group, n), "loop"
        for name, gradients in gradients_of.items():
            flat = gradients.reshape(n, -1)
            yield (
                name,
                VectorFactors(flat, partial(lengths, flat), flat.dtype),
                method,
            )


def _vmapped(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, group: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    keys = {f"model.{names[id(parameter)]}": name for name, parameter in group.items()}
    module = _Loss(model, loss_fn)
    values = {key: group[name].detach() for key, name in keys.items()}
    flat = [tensor for tensor in tensors_in(batch) if tensor.dim()]

    def loss(parameters: dict[str, Tensor], samples: list[Tensor]) -> Tensor:
        left = iter(samples)
        sample = map_tensors(batch, lambda _: next(left).unsqueeze(0))
        return torch.func.functional_call(module, parameters, (sample,))  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operations without a batching rule are slow, not wrong
        by_name = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="error")(values, flat)
    return {keys[key]: gradients.detach() for key, gradients in by_name.items()}


def _looped(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    group: Mapping[str, nn.Parameter],
    n: int,
) -> dict[str, Tensor]:
    leaves = list(group.values())
    out = {name: parameter.new_zeros(n, *parameter.shape) for name, parameter in group.items()}
    for i in range(n):
        loss = inputs.scalar(loss_fn(model, inputs.some(batch, torch.tensor([i]))))
        for name, gradient in zip(group, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
            if gradient is not None:
                out[name][i] = gradient.to_dense() if gradient.is_sparse else gradient
    return out
