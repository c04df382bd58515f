"""Steps of every optimizer, through torch's global step hooks, and which optimizers exist.

With a closure (L-BFGS) the gradients appear inside ``step``: the pre-hook replaces the closure by
one that reports after each evaluation.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if TYPE_CHECKING:
    from backlight.capture.hooks.patch import Patches
    from backlight.capture.hub import Hub


class SeenOptimizers:
    """Weak references to the optimizers of this process, in the order in which they were met.

    One that a scan found may belong to a training that is over: it counts as soon as it is used.

    Attributes
    ----------
    goes_on:
        Whether the closure of the step under way adds the last microbatch to gradients that are there.
    """

    goes_on = False

    def __init__(self) -> None:
        self._references: list[weakref.ref[torch.optim.Optimizer]] = []
        self._in_use: set[int] = set()

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember ``optimizer``, which was just made or is being used."""
        self._meet(optimizer)
        self._in_use.add(id(optimizer))

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        if all(reference() is not optimizer for reference in self._references):
            self._in_use.discard(id(optimizer))  # the id of one that is gone
            self._references.append(weakref.ref(optimizer))

    def scan(self) -> None:
        """Look for optimizers that were made before the hooks were there."""
        for candidate in gc.get_objects():
            # type() first: isinstance() on a stranger may run its __class__ property.
            if issubclass(type(candidate), torch.optim.Optimizer):
                self._meet(candidate)

    def use_holders(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count every optimizer that holds one of ``tensors`` as used."""
        wanted = {id(tensor) for tensor in tensors}
        for optimizer in self._alive():
            if any(id(p) in wanted or id(p.grad) in wanted for p in parameters_of(optimizer)):
                self._in_use.add(id(optimizer))

    def rest(self) -> None:
        """Count none as used any more: nobody watches from here on."""
        self._in_use.clear()

    def alive(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that exist and are in use."""
        return [optimizer for optimizer in self._alive() if id(optimizer) in self._in_use]

    def known(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that exist, in use or not."""
        return self._alive()

    def _alive(self) -> list[torch.optim.Optimizer]:
        self._references = [r for r in self._references if r() is not None]
        found = [reference() for reference in self._references]
        return [o for o in found if o is not None and getattr(o, "param_groups", None)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that ``optimizer`` holds, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def underlying(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that do the steps of ``optimizer``: itself, or those that it wraps.

    Frameworks hand out objects that look like an optimizer and call one (Accelerate, Lightning), or several
    (torchtitan, whose container has learning rates of its own that nobody uses). Torch's hooks see the steps
    of those inside. A wrapper that is an optimizer in its own right, such as Lookahead, is itself what steps.
    """
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, (list, tuple)) and several and all(hasattr(o, "param_groups") for o in several):
        return [inner for one in several for inner in underlying(one)]
    one = getattr(optimizer, "optimizer", None)
    if isinstance(one, torch.optim.Optimizer) and not getattr(type(optimizer).step, "hooked", False):
        return underlying(one)
    return [optimizer]


def install(hub: Hub, patches: Patches) -> list[Any]:
    """Report optimizer steps to the hub; return the handles that take the hooks off."""

    def wrap_init(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            if hub.active:
                hub.optimizers.use(self)
                hub.emit("optimizer_made", self)

        return __init__

    patches.replace(torch.optim.Optimizer, "__init__", wrap_init)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not hub.active:
            return None
        hub.optimizers.use(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            hub.emit("optimizer_begin", optimizer, has_closure=False)
            return None
        hub.optimizers.goes_on = _goes_on(closure)
        hub.emit("optimizer_begin", optimizer, has_closure=True)
        reporting = _reporting(hub, optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": reporting}
        return (args[0], reporting, *args[2:]), kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if hub.active:
            hub.emit("optimizer_end", optimizer)

    return [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]


def _goes_on(closure: Any) -> bool:
    """Tell whether the backward in ``closure`` belongs to those before the step, as Lightning's does.

    Its loop runs the last backward of an accumulation inside the step. Elsewhere gradients that are there
    when a step with a closure begins are whole, and the closure is for other weights (SAM).
    """
    inner = getattr(closure, "func", closure)  # a partial
    return (getattr(inner, "__module__", None) or "").startswith(("lightning.", "pytorch_lightning."))


def _reporting(hub: Hub, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(closure)
    def evaluate() -> Any:
        loss = closure()
        if hub.active:
            hub.emit("closure_end", optimizer)
        return loss

    return evaluate
