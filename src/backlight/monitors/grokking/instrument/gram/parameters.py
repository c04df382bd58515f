"""The trainable parameters of a model under measurement, and models that cannot be measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from backlight.capture.modules import NamedParameter, walk
from backlight.measure.gram.factors import Factors
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.result import Location, block_of


@dataclass
class Measured:
    """A trainable parameter while it is measured."""

    location: Location
    tensor: nn.Parameter
    expected: int = 0
    pieces: list[Factors] = field(default_factory=list)
    parts: list[list[Factors]] = field(default_factory=list)
    uncaptured: str = ""
    method: str = ""
    total: float = 0.0
    magnitude: float = 0.0
    summands: float = 0.0
    eps: float = 0.0
    pair: tuple[float, float, float] = (0.0, 0.0, 0.0)


def trainable(model: nn.Module) -> dict[str, Measured]:
    """Return the trainable parameters in model order, tied ones once under their first name."""
    found: dict[int, Measured] = {}
    for named in _current_parameters(model):
        tensor = named.parameter
        if not tensor.requires_grad or id(tensor) in found:
            continue
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise GramError(f"gram: parameter {named.name!r} has no shape yet; run the model once before")
        if hasattr(tensor, "placements"):
            raise GramError(
                f"gram: parameter {named.name!r} is sharded over processes (DTensor); measure an unsharded "
                "copy of the model, or have a watch gather it: measures={'gather': True}; outside of a "
                "watch, measure inside `with backlight.gathered(model):`, which every rank enters"
            )
        if not tensor.is_floating_point():
            raise GramError(
                f"gram: parameter {named.name!r} is {tensor.dtype}; only real parameters are supported"
            )
        location = Location(named.name, named.module or "(root)", block_of(named.name))
        found[id(tensor)] = Measured(location, tensor, eps=torch.finfo(tensor.dtype).eps)
    if not found:
        raise GramError("gram: the model has no parameter that requires a gradient")
    return {parameter.location.name: parameter for parameter in found.values()}


def _current_parameters(model: nn.Module) -> Iterator[NamedParameter]:
    """Yield the parameters that the modules hold now: in a gathered model, those of the forward pass."""
    for name, module in walk(model):
        for key, parameter in (vars(module).get("_parameters") or {}).items():
            if parameter is not None:
                full = f"{name}.{key}" if name else key
                yield NamedParameter(full, parameter, name, type(module).__name__)


def modules(model: nn.Module) -> list[nn.Module]:
    """Return every module of ``model`` once, wrappers looked through."""
    return list({id(module): module for _, module in walk(model)}.values())


def refuse_mixing(model: nn.Module) -> None:
    """Refuse, by name, modules in which samples are not independent or parameters change."""
    for name, module in walk(model):
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if batch_norm and (module.training or module.running_mean is None):
            raise GramError(
                f"gram: module {name!r} ({type(module).__name__}) normalises over the batch, so that samples "
                "have no gradient of their own; call model.eval(), or use GroupNorm or LayerNorm"
            )
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
            raise GramError(
                f"gram: module {name!r} (Embedding) has scale_grad_by_freq, which scales a sample's gradient "
                "by what other samples hold; turn it off"
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise GramError(
                f"gram: module {name!r} (Embedding) has max_norm, which changes its weight in forward; turn "
                "it off to measure"
            )


@contextlib.contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run compiled parts of the model eagerly, where hooks are called."""
    compiled = any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
