"""Where the engines of DeepSpeed keep parameters and gradients: names of DeepSpeed, read here alone.

A ZeRO optimizer lays the parameters of a group one behind the other, cuts the line into one piece per rank, and
keeps fp32 weights and gradients of its own piece only: they are no longer where autograd and ``torch.optim``
expect them. Here each parameter has a *share*: a tensor of this process on the memory of those fp32 weights, with
the gradient that the optimizer uses as ``.grad`` while it steps. A share stands for the parameter wherever a run is
observed, as the shards of FSDP2 do. Nothing is gathered: readers join the ranks.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.sharding import FlatPlace
from backlight.records import Layout, Placement

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub

_OPTIMIZERS = {
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
}
"""What an engine wraps around the user's optimizer, by module."""

_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Attribute with the model's parameters by group; those of stage 3 are parts of groups."""

NVME = "DeepSpeed keeps gradients and fp32 weights on NVMe, and to read them there costs what writing them did"


class Share:
    """What this rank holds of a parameter: ``tensor`` has its fp32 weights, the elements from ``start`` on."""

    def __init__(self, parameter: torch.Tensor, outer: Any) -> None:
        key = id(parameter)
        # Weak: it holds the optimizer, which would never be freed.
        self.parameter = weakref.ref(parameter, lambda _: SHARES.pop(key, None))
        self.shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        weights, self.start = _weights(outer, parameter)
        self.tensor = weights.detach().requires_grad_()

    @property
    def place(self) -> FlatPlace:
        """Its run of elements in the flattened parameter."""
        return _place(self.shape, self.start, self.tensor.numel())

    def load(self, outer: Any) -> None:
        """Take the gradient that the optimizer is about to use; and its weights, where they have moved."""
        parameter = self.parameter()
        if parameter is None:
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
    ``grad_scale`` is the loss scale that gradients contain when a step begins, ``found_inf`` becomes 1 where the
    engine skips that step.
    """

    def __init__(self, outer: Any) -> None:
        self._outer = weakref.ref(outer)
        self.inner: torch.optim.Optimizer = outer.optimizer
        self.why_unmeasured = NVME if getattr(outer, "swap_optimizer", False) else ""
        self.shares: list[Share] = []
        self._shared: list[list[torch.Tensor]] = []
        self.grad_scale: float | None = None
        self.found_inf: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        for group in _groups(outer):
            shares = [] if self.why_unmeasured or not _is_cut(group) else [Share(p, outer) for p in group]
            for parameter, share in zip(group, shares, strict=bool(shares)):
                SHARES[id(parameter)] = share
            self.shares += shares
            self._shared.append([share.tensor for share in shares])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the user's optimizer, each with the model's parameters."""
        outer, options = self._outer(), self.inner.param_groups
        held = self._shared if self.shares else [] if outer is None else _groups(outer)
        if len(options) != len(held):  # ZeRO takes all groups but one out while it steps
            options = [{} for _ in held]
        return [{**group, "params": own} for group, own in zip(options, held, strict=True)]

    @property
    def state(self) -> Any:
        """The state of the user's optimizer; its keys are no parameters of the model."""
        return self.inner.state

    def begin(self) -> bool:
        """Give the shares their gradients; return whether a loss scale is in use."""
        outer = self._outer()
        scale = float(getattr(outer, "loss_scale", 1.0) or 1.0)
        self.grad_scale = None if scale == 1.0 else scale
        self.found_inf, self._scale = torch.zeros(()), torch.tensor(scale)
        for share in self.shares:
            share.load(outer)
        return self.grad_scale is not None

    def end(self) -> tuple[bool, float, torch.Tensor | None]:
        """Return whether the step was skipped, the limit of clipping (0 for none), and the norm before it."""
        outer = self._outer()
        skipped = bool(getattr(outer, "overflow", False))
        if self.found_inf is not None:
            self.found_inf.fill_(skipped)
        norm = getattr(outer, "_global_grad_norm", None)
        found = None if norm is None else torch.as_tensor(norm, dtype=torch.float32).detach()
        return skipped, float(getattr(outer, "clip_grad", 0.0) or 0.0), found

    def release(self) -> None:
        """Take the gradients from the shares."""
        for share in self.shares:
            share.tensor.grad = None


SHARES: dict[int, Share] = {}
"""Shares by ``id`` of the parameter; empty without an engine that cuts parameters."""

_KNOWN: weakref.WeakKeyDictionary[Any, EngineOptimizer] = weakref.WeakKeyDictionary()


def shared(parameter: Any) -> Any:
    """Return the tensor that stands for ``parameter``: its share, else the parameter itself."""
    share = SHARES.get(id(parameter))
    return share.tensor if share is not None and share.parameter() is parameter else parameter


def engine_places(roots: Sequence[nn.Module]) -> dict[int, FlatPlace]:
    """Return the positions of shares, and of frozen parameters that stage 3 cuts, by ``id`` of the tensor."""
    found = {id(share.tensor): share.place for share in SHARES.values()}
    for root in roots if found else ():
        for parameter in root.parameters():
            if hasattr(parameter, "ds_id") and id(parameter) not in SHARES:
                size, start = _own_part(parameter)
                found[id(parameter)] = _place(tuple(parameter.ds_shape), start, size)
    return found


def why_unmeasured(tensor: torch.Tensor) -> str:
    """Return why an engine's gradient of ``tensor`` cannot be read, empty where it can."""
    for one in _KNOWN.values() if hasattr(tensor, "ds_id") else ():
        if one.why_unmeasured and any(tensor is p for group in one.param_groups for p in group["params"]):
            return one.why_unmeasured
    return ""


def adapted(outer: Any) -> EngineOptimizer | None:
    """Return what stands for the optimizer of an engine; None for any other object."""
    if not any(issubclass(type(outer), kind) for kind in _kinds()):
        return None
    known = _KNOWN.get(outer)
    if known is None:
        # Named as the optimizer that the user chose: fingerprints and findings name the class.
        kind = type(type(outer.optimizer).__name__, (EngineOptimizer,), {})
        known = _KNOWN[outer] = kind(outer)
    return known


def engines(roots: Iterable[nn.Module]) -> Iterator[tuple[Any, list[int]]]:
    """Yield each engine among ``roots`` and below, and the ranks between which it averages gradients."""
    kind = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    for root in roots if kind is not None else ():
        for module in root.modules():
            # type() first: isinstance() on a third-party object may run its __class__ property.
            if issubclass(type(module), kind) and (group := module.seq_data_parallel_group) is not None:
                yield module, list(torch.distributed.get_process_group_ranks(group))


def kinds() -> tuple[type, ...]:
    """Return the classes of an engine's optimizers, as far as DeepSpeed is imported."""
    return tuple(_kinds())


def install_engines(hub: Hub, patches: Patches) -> None:
    """Report the steps of an engine's optimizers to the hub, and each loss that they scale.

    The step of the optimizer inside is a part of one: the engine has unscaled and clipped before it, and calls
    it once per group.
    """

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
            engine = adapted(self) if hub.active and not hub.in_engine else None
            if engine is None:
                return original(self, *args, **kwargs)
            hub.optimizers.use_engine(engine)
            is_scaled = engine.begin()
            if is_scaled:
                hub.emit("scaler_begin", engine, engine)
            hub.emit("optimizer_begin", engine, has_closure=False)
            hub.in_engine = True
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                engine.release()
                raise
            finally:
                hub.in_engine = False
            skipped, limit, norm = engine.end()
            if is_scaled:
                hub.emit("unscaled", engine, engine)
            if limit and not skipped:
                own = [p for group in engine.param_groups for p in group["params"]]
                hub.emit("clip_begin", "norm", own, limit, norm)
                hub.emit("clip_end")
            hub.emit("optimizer_end", engine)
            if is_scaled:
                hub.emit("scaler_end", engine, engine, stepped=not skipped)
            engine.release()
            return result

        return step

    def wrap_scale(original: Any) -> Any:
        @functools.wraps(original)
        def scale_if_loss(self: Any, value: Any) -> Any:
            result = original(self, value)
            if hub.active and result is not value and isinstance(value, torch.Tensor):
                hub.emit("scaled", self, value, result)
            return result

        return scale_if_loss

    norms: list[torch.Tensor] = []

    def wrap_norm(original: Any) -> Any:
        @functools.wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            norms[:] = [norm.detach()]
            return norm

        return clip_grad_norm_

    def wrap_clip(original: Any) -> Any:
        @functools.wraps(original)
        def clip_fp32_gradients(self: Any) -> None:
            if not hub.active:
                return original(self)
            # The norm is known afterwards, and gradients are read before.
            hub.optimizers.use(self.basic_optimizer)
            hub.emit("unscaled", None, self.basic_optimizer)
            result = original(self)
            if norms:
                own = [p for p in self.module.parameters() if p.grad is not None]
                hub.emit("clip_begin", "norm", own, float(self.gradient_clipping()), norms.pop())
                hub.emit("clip_end")
            return result

        return clip_fp32_gradients

    runtime = sys.modules.get("deepspeed.runtime.engine")
    if runtime is not None and hasattr(runtime, "DeepSpeedEngine"):
        patches.replace(runtime, "clip_grad_norm_", wrap_norm)
        patches.replace(runtime.DeepSpeedEngine, "clip_fp32_gradients", wrap_clip)
    for kind in _kinds():
        patches.replace(kind, "__init__", wrap_init)
        patches.replace(kind, "step", wrap_step)
    base = sys.modules.get("deepspeed.runtime.base_optimizer")
    if (scaling := getattr(base, "ZeROOptimizer", None)) is not None:
        patches.replace(scaling, "scale_if_loss", wrap_scale)


def _kinds() -> Iterator[type]:
    for module, name in _OPTIMIZERS.items():
        if (kind := getattr(sys.modules.get(module), name, None)) is not None:
            yield kind


def _groups(outer: Any) -> list[list[torch.Tensor]]:
    groups: list[list[torch.Tensor]] = next(
        (found for name in _GROUPS if (found := getattr(outer, name, None)) is not None), []
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
    """Return size and start of what this rank holds of a parameter of stage 3; the last piece is filled up."""
    size, rank = int(parameter.partition_numel()), int(parameter.ds_zero_partition_rank)
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
            flat = outer.fp32_partitioned_groups_flat[group].grad
            return None if flat is None else flat.narrow(0, offset, size)
        return sys.modules["deepspeed.utils"].safe_get_local_grad(parameter).view(-1)[:size]
    mapping = parameter._hp_mapping
    if mapping is None:
        return torch.empty(0, device=parameter.device)
    try:
        part = mapping.get_lp_grad_fragment(parameter._index_in_param_group).detach().reshape(-1)
    except ValueError:  # only between backward and step
        return None
    # BF16_Optimizer keeps the whole gradient on every rank, and uses its own part.
    start = int(mapping.lp_fragment_address.start) if part.numel() == parameter.numel() else 0
    return part.narrow(0, start, size)


def _place(shape: tuple[int, ...], start: int, size: int) -> FlatPlace:
    whole = math.prod(shape)
    return FlatPlace(shape, Placement(Layout.SHARD, (whole,), (size,), (start if size else 0,)))
