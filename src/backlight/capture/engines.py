"""Where the engines of DeepSpeed keep parameters and gradients.

A ZeRO optimizer lays the parameters of a group one behind the other, cuts the line into one piece per rank,
and keeps fp32 weights and gradients of its own piece only: they are no longer where autograd and
``torch.optim`` expect them. Here each parameter has a *share*: a tensor of backlight on the memory of those
fp32 weights, with the gradient that the optimizer uses as ``.grad`` while it steps. A share stands for the
parameter wherever a run is observed, as the shards of FSDP2 do. Nothing is gathered: readers join the ranks.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from backlight import clock
from backlight.capture.sharding import FlatPlace
from backlight.interrupts import is_interrupt
from backlight.records import Layout, Placement

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub


Result = TypeVar("Result")

RUNTIME = "deepspeed.runtime.engine"
"""The module of the engine."""

_OPTIMIZERS = {
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
}
"""What an engine wraps around the user's optimizer, by module."""

_SCALED_NORM = "FP16_UnfusedOptimizer"
"""The optimizer whose global norm still contains the loss scale."""

_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Attribute with the model's parameters by group; those of stage 3 are parts of groups."""

NVME = (
    "DeepSpeed keeps gradients and fp32 weights on NVMe, and to read them there costs what writing them did"
)


class Share:
    """What this rank holds of a parameter: ``tensor`` has its fp32 weights, the elements from ``start`` on.

    ``why_unmeasured`` says why weights and gradient cannot be read; the tensor is then empty.
    """

    def __init__(self, parameter: torch.Tensor, outer: Any, why_unmeasured: str) -> None:
        key = id(parameter)
        # Weak: it holds the optimizer, which would never be freed.
        self.parameter = weakref.ref(parameter, lambda _: SHARES.pop(key, None))
        self.shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        self.why_unmeasured = why_unmeasured
        if why_unmeasured:
            size, start = _own_part(parameter)
            weights = torch.empty(0)
        else:
            weights, start = _weights(outer, parameter)
            size = weights.numel()
        self.tensor = weights.detach().requires_grad_()
        self.place = _place(self.shape, start, size)
        """Its run of elements in the flattened parameter."""

    def load(self, outer: Any) -> None:
        """Take the gradient that the optimizer is about to use; and its weights, where they have moved."""
        parameter = self.parameter()
        if parameter is None or self.why_unmeasured:
            return
        weights, _ = _weights(outer, parameter)
        if weights.data_ptr() != self.tensor.data_ptr():
            self.tensor.data = weights.detach()
        gradient = _gradient(outer, parameter, self.tensor.numel())
        # Casting to fp32 is exact; a gradient that is fp32 already is not copied.
        self.tensor.grad = None if gradient is None else gradient.to(self.tensor)


class EngineOptimizer:
    """The optimizer of an engine in terms of the model's parameters, with the attributes that torch's have.

    ``param_groups`` hold the shares, or the parameters themselves where the engine keeps them whole.
    ``grad_scale`` is the loss scale that gradients contain when a step begins, ``found_inf`` becomes 1 where
    the engine skips that step.
    """

    def __init__(self, outer: Any) -> None:
        self._outer = weakref.ref(outer)
        self.inner: torch.optim.Optimizer = outer.optimizer
        why_unmeasured = NVME if getattr(outer, "swap_optimizer", False) else ""
        self.shares: list[Share] = []
        self._shared: list[list[torch.Tensor]] = []
        self.grad_scale: float | None = None
        self.found_inf: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None  # as GradScaler has it: the hooks read both alike
        for group in _groups(outer):
            shares = [Share(p, outer, why_unmeasured) for p in group] if _is_cut(group) else []
            SHARES.update({id(p): share for p, share in zip(group, shares, strict=False)})
            self.shares += shares
            self._shared.append([share.tensor for share in shares])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the user's optimizer, each with the model's parameters."""
        outer, options = self._outer(), self.inner.param_groups
        parameters_of = self._shared if self.shares else [] if outer is None else _groups(outer)
        if len(options) != len(parameters_of):  # ZeRO takes all groups but one out while it steps
            options = [{} for _ in parameters_of]
        return [{**group, "params": members} for group, members in zip(options, parameters_of, strict=True)]

    @property
    def state(self) -> Any:
        """The state of the user's optimizer; its keys are no parameters of the model."""
        return self.inner.state

    def begin(self, *, loads: bool) -> bool:
        """Give the shares their gradients if it ``loads``; return whether a loss scale is in use."""
        outer = self._outer()
        scale = float(getattr(outer, "loss_scale", 1.0) or 1.0)
        self.grad_scale = None if scale == 1.0 else scale
        self.found_inf, self._scale = torch.zeros(()), torch.tensor(scale)
        for share in self.shares if loads else ():
            share.load(outer)
        return self.grad_scale is not None

    def end(self) -> tuple[bool, float, torch.Tensor | None]:
        """Return whether the step was skipped, the limit of clipping (0 for none), and the norm before it."""
        outer = self._outer()
        skipped = bool(getattr(outer, "overflow", False))
        if self.found_inf is not None:
            self.found_inf.fill_(skipped)
        norm = getattr(outer, "_global_grad_norm", None)
        norm_before = None if norm is None else torch.as_tensor(norm, dtype=torch.float32).detach()
        if norm_before is not None and type(outer).__name__ == _SCALED_NORM:
            norm_before = norm_before / (self.grad_scale or 1.0)
        return skipped, float(getattr(outer, "clip_grad", 0.0) or 0.0), norm_before

    def release(self) -> None:
        """Take the gradients from the shares."""
        for share in self.shares:
            share.tensor.grad = None


SHARES: dict[int, Share] = {}
"""Shares by ``id`` of the parameter; empty without an engine that cuts parameters."""

_KNOWN: weakref.WeakKeyDictionary[Any, EngineOptimizer] = weakref.WeakKeyDictionary()
_BROKEN: weakref.WeakSet[Any] = weakref.WeakSet()

ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines that were met."""


def shared(parameter: Any) -> Any:
    """Return the tensor that stands for ``parameter``: its share, else the parameter itself."""
    share = SHARES.get(id(parameter))
    return share.tensor if share is not None and share.parameter() is parameter else parameter


def engine_places(roots: Sequence[nn.Module]) -> dict[int, FlatPlace]:
    """Return the positions of shares, and of frozen parameters that stage 3 cuts, by ``id`` of the tensor."""
    places = {id(share.tensor): share.place for share in SHARES.values()}
    for root in roots if _KNOWN else ():
        places |= attempt(root, partial(_frozen_places, root), "frozen parameters") or {}
    return places


def _frozen_places(root: nn.Module) -> dict[int, FlatPlace]:
    places = {}
    parameter: Any
    for parameter in root.parameters():
        if hasattr(parameter, "ds_id") and id(parameter) not in SHARES:
            size, start = _own_part(parameter)
            places[id(parameter)] = _place(tuple(parameter.ds_shape), start, size)
    return places


def why_unmeasured(tensor: torch.Tensor) -> str:
    """Return why an engine's gradient of ``tensor`` cannot be read, empty where it can."""
    if tensor.numel():  # such a share is empty
        return ""
    return next((share.why_unmeasured for share in SHARES.values() if share.tensor is tensor), "")


def adapted(outer: Any) -> EngineOptimizer | None:
    """Return what stands for the optimizer of an engine; None for any other object."""
    if not any(issubclass(type(outer), kind) for kind in optimizer_kinds()):
        return None
    engine = _KNOWN.get(outer)
    if engine is None:
        # Named as the optimizer that the user chose: fingerprints and findings name the class.
        kind = type(type(outer.optimizer).__name__, (EngineOptimizer,), {})
        engine = attempt(outer, lambda: kind(outer))
        if engine is not None:
            _KNOWN[outer] = engine
    return engine


def attempt(outer: Any, call: Callable[[], Result], what: str = "steps") -> Result | None:
    """Return what ``call`` reads of an optimizer or model, None and a warning where it is kept elsewhere."""
    if outer in _BROKEN:
        return None
    try:
        return call()
    except Exception as error:
        if is_interrupt(error):
            raise
        _BROKEN.add(outer)
        warnings.warn(
            f"backlight: not measured: {what} of DeepSpeed's {type(outer).__name__}, after "
            f"{type(error).__name__}: {error}. Your training continues unchanged.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def are_imported() -> bool:
    """Return whether the process has imported DeepSpeed's engine."""
    return RUNTIME in sys.modules


def live_engines() -> list[EngineOptimizer]:
    """Return what stands for the optimizer of every engine of the process."""
    optimizers = []
    for candidate in gc.get_objects():
        # type() first: isinstance() on a third-party object may run its __class__ property.
        if issubclass(type(candidate), engine_kinds()):
            ENGINES.add(candidate)
        elif (optimizer := adapted(candidate)) is not None:
            optimizers.append(optimizer)
    return optimizers


def engines(roots: Iterable[nn.Module]) -> list[tuple[Any, list[int]]]:
    """Return the engines of modules among ``roots`` and below, with the ranks that each averages over."""
    if not are_imported():
        return []
    inside = {id(module): module for root in roots for module in root.modules()}
    met: list[Any] = [module for module in inside.values() if issubclass(type(module), engine_kinds())]
    met += [engine for engine in ENGINES if engine not in met and id(engine.module) in inside]
    groups = [(engine, engine.seq_data_parallel_group) for engine in met]
    return [
        (engine, list(torch.distributed.get_process_group_ranks(group)))
        for engine, group in groups
        if group is not None
    ]


def engine_kinds() -> tuple[type, ...]:
    """Return the class of engines, where DeepSpeed is imported."""
    kind = getattr(sys.modules.get(RUNTIME), "DeepSpeedEngine", None)
    return () if kind is None else (kind,)


def optimizer_kinds() -> Iterator[type]:
    """Yield the classes of what engines wrap around optimizers, as far as they are imported."""
    for module, name in _OPTIMIZERS.items():
        if (kind := getattr(sys.modules.get(module), name, None)) is not None:
            yield kind


def _groups(outer: Any) -> list[list[torch.Tensor]]:
    groups: list[list[torch.Tensor]] = next(
        (groups_of for name in _GROUPS if (groups_of := getattr(outer, name, None)) is not None), []
    )
    of = getattr(outer, "sub_group_to_group_id", None)
    if not of:
        return groups
    whole: list[list[torch.Tensor]] = [[] for _ in outer.optimizer.param_groups]
    for number, group in enumerate(groups):
        whole[of.get(number, 0)] += group
    return whole


def _is_cut(group: Sequence[torch.Tensor]) -> bool:
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping") for parameter in group)


def _own_part(parameter: Any) -> tuple[int, int]:
    """Return size and start of what this rank holds of a parameter of stage 3."""
    rank = int(parameter.ds_zero_partition_rank)
    size = int(parameter.partition_numel())  # the last piece is filled up
    return max(0, min(size, int(parameter.ds_numel) - rank * size)), rank * size


def _weights(outer: Any, parameter: Any) -> tuple[torch.Tensor, int]:
    """Return this rank's fp32 weights of a parameter, and the element with which they begin."""
    if hasattr(parameter, "ds_id"):
        group, offset, _ = outer.grad_position[outer.get_param_id(parameter)]
        size, start = _own_part(parameter)
        return outer.fp32_partitioned_groups_flat[group].detach().narrow(0, offset, size), start
    mapping = parameter._hp_mapping
    if mapping is None:
        return torch.empty(0, device=parameter.device), 0
    return mapping.hp_fragment, int(mapping.lp_fragment_address.start)


def _gradient(outer: Any, parameter: Any, size: int) -> torch.Tensor | None:
    """Return this rank's part of a gradient, reduced over the ranks; None where the engine has none."""
    if hasattr(parameter, "ds_id"):
        group, offset, _ = outer.grad_position[outer.get_param_id(parameter)]
        if outer.offload_optimizer:
            flat: torch.Tensor | None = outer.fp32_partitioned_groups_flat[group].grad
            return None if flat is None else flat.narrow(0, offset, size)
        local_part: torch.Tensor = sys.modules["deepspeed.utils"].safe_get_local_grad(parameter)
        return local_part.view(-1)[:size]
    mapping = parameter._hp_mapping
    if mapping is None:
        return torch.empty(0, device=parameter.device)
    try:
        part: torch.Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group).detach()
    except ValueError:  # only between backward and step
        return None
    # BF16_Optimizer keeps the whole gradient on every rank, and uses its own part.
    start = int(mapping.lp_fragment_address.start) if part.numel() == parameter.numel() else 0
    return part.reshape(-1).narrow(0, start, size)


def _place(shape: tuple[int, ...], start: int, size: int) -> FlatPlace:
    whole = math.prod(shape)
    return FlatPlace(shape, Placement(Layout.SHARD, (whole,), (size,), (start if size else 0,)))


def underlying(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that do the steps of ``optimizer``: itself, or those that it wraps.

    Frameworks hand out objects that look like an optimizer and call one (Accelerate, Lightning), or several
    (torchtitan, whose container has learning rates of its own that are not used). Torch's hooks see the steps
    of those inside. A wrapper that is an optimizer in its own right, such as Lookahead, is itself what steps.
    """
    if (engine := adapted(optimizer)) is not None:
        return [engine]  # type: ignore[list-item]  # it has what is used of one
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, (list, tuple)) and several and all(hasattr(o, "param_groups") for o in several):
        return [inner for optimizer in several for inner in underlying(optimizer)]
    wrapped = getattr(optimizer, "optimizer", None)
    if adapted(wrapped) is not None:
        return underlying(wrapped)
    if isinstance(wrapped, torch.optim.Optimizer) and not getattr(type(optimizer).step, "hooked", False):
        return underlying(wrapped)
    return [optimizer]


# Hooks on the engines of DeepSpeed, which step, scale and clip with functions of their own.
#
# The step of the optimizer inside is a part of one: the engine has unscaled and clipped before it, and calls
# it once per group.


def install_engines(hub: Hub, patches: Patches) -> None:
    """Report steps, loss scaling and clipping of engines to the hub, as those of torch are reported."""
    _install_optimizers(hub, patches)
    _install_clipping(hub, patches)

    def wrap_init(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            ENGINES.add(self)

        return __init__

    def wrap_scale(original: Any) -> Any:
        @functools.wraps(original)
        def scale_if_loss(self: Any, value: Any) -> Any:
            result = original(self, value)
            if hub.active and result is not value and isinstance(value, torch.Tensor):
                hub.emit("scaled", self, value, result)
            return result

        return scale_if_loss

    for kind in engine_kinds():
        patches.replace(kind, "__init__", wrap_init)
    base = sys.modules.get("deepspeed.runtime.base_optimizer")
    if (scaling := getattr(base, "ZeROOptimizer", None)) is not None:
        patches.replace(scaling, "scale_if_loss", wrap_scale)


def _install_optimizers(hub: Hub, patches: Patches) -> None:
    def wrap_init(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            if hub.listeners and (engine := adapted(self)) is not None:
                hub.optimizers.use_engine(engine)

        return __init__

    def wrap_step(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not hub.active or hub.in_engine:
                return original(self, *args, **kwargs)
            engine = _begin(hub, self)
            hub.in_engine = True
            try:
                result = original(self, *args, **kwargs)
            finally:
                hub.in_engine = False
            if engine is not None:
                _end(hub, self, engine)
            return result

        return step

    for kind in optimizer_kinds():
        patches.replace(kind, "__init__", wrap_init)
        patches.replace(kind, "step", wrap_step)


def _begin(hub: Hub, outer: Any) -> EngineOptimizer | None:
    """Report the begin of a step; return None where it cannot be observed."""
    engine = adapted(outer)
    if engine is None:
        return None
    hub.optimizers.use_engine(engine)
    began = clock.thread_time()
    is_scaled = attempt(outer, lambda: engine.begin(loads=hub.reads_gradients()))
    hub.spent += clock.thread_time() - began
    if is_scaled is None:
        return None
    if is_scaled:
        hub.emit("scaler_begin", engine, engine)
    hub.emit("optimizer_begin", engine, has_closure=False)
    return engine


def _end(hub: Hub, outer: Any, engine: EngineOptimizer) -> None:
    """Report the end of a step, with what the engine did in it."""
    ended = attempt(outer, engine.end)
    skipped, limit, norm = (False, 0.0, None) if ended is None else ended
    is_scaled = engine.grad_scale is not None
    if is_scaled:
        hub.emit("unscaled", engine, engine)
    if limit and not skipped:
        parameters = [parameter for group in engine.param_groups for parameter in group["params"]]
        hub.emit("clip_begin", "norm", parameters, limit, norm)
        hub.emit("clip_end")
    hub.emit("optimizer_end", engine)
    if is_scaled:
        hub.emit("scaler_end", engine, engine, stepped=not skipped)
    engine.release()


def _install_clipping(hub: Hub, patches: Patches) -> None:
    """Report the clipping that an engine does itself before the step of an optimizer of torch."""
    norms: list[torch.Tensor] = []

    def wrap_norm(original: Any) -> Any:
        @functools.wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            norms[:] = [norm.detach()] if isinstance(norm, torch.Tensor) else []
            return norm

        return clip_grad_norm_

    def wrap_clip(original: Any) -> Any:
        @functools.wraps(original)
        def clip_fp32_gradients(self: Any) -> None:
            if not hub.active:
                original(self)
                return
            # The norm is known afterwards, and gradients are read before.
            hub.optimizers.use(self.basic_optimizer)
            hub.emit("unscaled", None, self.basic_optimizer)
            original(self)
            if norms:
                parameters = [p for p in self.module.parameters() if p.grad is not None]
                hub.emit("clip_begin", "norm", parameters, float(self.gradient_clipping()), norms.pop())
                hub.emit("clip_end")

        return clip_fp32_gradients

    patches.replace(sys.modules[RUNTIME], "clip_grad_norm_", wrap_norm)
    for kind in engine_kinds():
        patches.replace(kind, "clip_fp32_gradients", wrap_clip)
