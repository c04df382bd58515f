"""The model, batch and loss of a measurement: its trainable parameters, and what is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import map_leaves, map_tensors
from backlight.capture.modules import is_compiled, walk
from backlight.measure.gram.factors import Factors
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.result import Location, block_of

ALONE = frozenset({"vmap", "loop"})
"""Methods that run each sample alone."""


_NONE = torch.zeros(1, dtype=torch.float64)


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
    eps: float = 0.0
    # Of a measurement that is checked:
    total: float = 0.0
    magnitude: float = 0.0
    sizes: Tensor = _NONE
    entries: Tensor = _NONE
    independence: float | None = None

    def forget(self) -> None:
        """Forget what a sweep measured."""
        new = Measured(self.location, self.tensor, eps=torch.finfo(self.tensor.dtype).eps)
        vars(self).update(vars(new))


def trainable(model: nn.Module) -> dict[str, Measured]:
    """Return the trainable parameters in model order, tied ones once under their first name."""
    measured: dict[int, Measured] = {}
    # What the modules hold now: in a gathered model, the parameters of the forward pass.
    tensors_of = (
        (f"{module_name}.{key}" if module_name else key, module_name, tensor)
        for module_name, module in walk(model)
        for key, tensor in (vars(module).get("_parameters") or {}).items()
    )
    for name, module_name, tensor in tensors_of:
        if tensor is None or not tensor.requires_grad or id(tensor) in measured:
            continue
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise GramError(f"gram: parameter {name!r} has no shape yet; run the model once before")
        if hasattr(tensor, "placements"):
            raise GramError(
                f"gram: parameter {name!r} is sharded over processes (DTensor); measure an unsharded "
                "copy of the model, or have a watch gather it: grokking={'gather': True}; outside of a "
                "watch, measure inside `with backlight.gathered(model):`, which every rank enters"
            )
        if not tensor.is_floating_point():
            raise GramError(f"gram: parameter {name!r} is {tensor.dtype}; only real parameters are supported")
        location = Location(name, module_name or "(root)", block_of(name))
        measured[id(tensor)] = Measured(location, tensor, eps=torch.finfo(tensor.dtype).eps)
    if not measured:
        raise GramError("gram: the model has no parameter that requires a gradient")
    return {parameter.location.name: parameter for parameter in measured.values()}


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
    compiled = any(map(is_compiled, model.modules()))
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _with_paths(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a batch with its path: ``['ids'][0]``."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key in batch:
            yield from _with_paths(batch[key], f"{path}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        for index, item in enumerate(batch):
            yield from _with_paths(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for entry in dataclasses.fields(batch):
            yield from _with_paths(getattr(batch, entry.name), f"{path}.{entry.name}")


def count(batch: Any) -> int:
    """Return N, the length of the first dimension of the batch's tensors."""
    sizes = {f"batch{path}": tensor.shape[0] for path, tensor in _with_paths(batch) if tensor.dim()}
    if not sizes:
        raise GramError(
            f"gram: the batch holds no tensor with a first dimension, got {type(batch).__name__}; "
            "give tensors, or tuples, lists and dicts of them, with samples along the first dimension"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path} {size}" for path, size in sizes.items())
        raise GramError(
            f"gram: samples must lie along the first dimension of every tensor of the batch, got {listed}; "
            "transpose the batch, and turn it back within loss_fn"
        )
    n = next(iter(sizes.values()))
    if not n:
        raise GramError("gram: the batch holds no sample; expected at least one along the first dimension")
    return n


def some(batch: Any, index: Tensor) -> Any:
    """Return the samples of ``index`` ``[n]``."""
    return map_tensors(
        batch,
        lambda tensor: (
            tensor.detach().index_select(0, index.to(tensor.device)).requires_grad_(tensor.requires_grad)
        ),
    )


def doubled(tensor: Tensor) -> Tensor:
    """Return a float64 copy of a floating tensor, any other as it is."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def joined(batch: Any, against: Any) -> tuple[Any, int]:
    """Return both batches as one, the samples of ``against`` last, and how many these are."""
    count(batch)
    others = count(against)
    first, second = list(_with_paths(batch)), list(_with_paths(against))
    shapes = [[(path, x.shape[1:], x.dtype) for path, x in entries] for entries in (first, second)]
    if shapes[0] != shapes[1]:
        differing = next((pair for pair in zip(*shapes, strict=False) if pair[0] != pair[1]), None)
        what = f"{len(first)} and {len(second)} tensors"
        if differing is not None:
            (path, shape, kind), (other_path, other, other_kind) = differing
            what = f"batch{path} {list(shape)} {kind} and against{other_path} {list(other)} {other_kind}"
        raise GramError(
            "gram: `against` must hold the same tensors as the batch, but for their first dimension, got "
            f"{what}"
        )
    left = iter(x for _, x in second)

    def join(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        other = next(left)
        return torch.cat([leaf.detach(), other.detach().to(leaf.device)]) if leaf.ndim else leaf

    return map_leaves(batch, join), others


def scalar(loss: Any) -> Tensor:
    """Return ``loss`` if it is what a loss function must return."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise GramError(
            f"gram: loss_fn(model, batch) must return one real number, the sum over samples, got {got}; "
            "return losses.sum()"
        )
    if not loss.requires_grad:
        raise GramError(
            "gram: the loss depends on no parameter that requires a gradient; compute it with gradients on, "
            "without detach() or item()"
        )
    if not bool(torch.isfinite(loss)):
        raise GramError(f"gram: the loss is {float(loss.detach())}; `backlight nan` finds its origin")
    return loss.reshape(())


def norms(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the norm of each gradient, 0 where there is none, waiting for the device once."""
    dense = {
        name: gradient.coalesce().values() if gradient.is_sparse else gradient
        for name, gradient in gradients.items()
        if gradient is not None
    }
    sizes = dict.fromkeys(gradients, 0.0)
    if dense:
        measured = torch._foreach_norm(
            list(dense.values()), 2, dtype=torch.float64
        )  # as clip_grad_norm_ does
        sizes.update(zip(dense, torch.stack(list(measured)).tolist(), strict=True))
    return sizes
