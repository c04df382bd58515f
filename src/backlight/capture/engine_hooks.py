"""Hooks on the engines of DeepSpeed, which step, scale and clip with functions of their own.

The step of the optimizer inside is a part of one: the engine has unscaled and clipped before it, and calls it
once per group.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from backlight import clock
from backlight.capture.engines import (
    ENGINES,
    RUNTIME,
    EngineOptimizer,
    adapted,
    attempt,
    engine_kinds,
    optimizer_kinds,
)

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub


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
    found = attempt(outer, engine.end)
    skipped, limit, norm = (False, 0.0, None) if found is None else found
    is_scaled = engine.grad_scale is not None
    if is_scaled:
        hub.emit("unscaled", engine, engine)
    if limit and not skipped:
        own = [parameter for group in engine.param_groups for parameter in group["params"]]
        hub.emit("clip_begin", "norm", own, limit, norm)
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
                own = [p for p in self.module.parameters() if p.grad is not None]
                hub.emit("clip_begin", "norm", own, float(self.gradient_clipping()), norms.pop())
                hub.emit("clip_end")

        return clip_fp32_gradients

    patches.replace(sys.modules[RUNTIME], "clip_grad_norm_", wrap_norm)
    for kind in engine_kinds():
        patches.replace(kind, "clip_fp32_gradients", wrap_clip)
