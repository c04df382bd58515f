"""Hooks on the functions that clip gradients, and on the method of FSDP1 that does."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub

FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
"""Module of the class that clips by a method of its own, since its gradients are parts."""

_GROUP = "_group_tensors_by_device_and_dtype"
_SCALES = "_clip_grads_with_norm_"


def install_clipping(hub: Hub, patches: Patches) -> None:
    """Report clipping by norm and by value to the hub, before the gradients change.

    ``clip_grad_norm_`` looks up two functions of its module at every call, the one that measures the norm and
    the one that scales; ``clip_grad_value_`` looks up the one that groups gradients. Names that were imported
    earlier are caught there too.
    """
    inside_norm = [0]

    def wrap_scale(original: Any) -> Any:
        @functools.wraps(original)
        def scale(
            parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            unrecorded, is_observed = hub.unrecorded, hub.active
            if unrecorded is not None and hub.training.others and hub.training.is_elsewhere:
                unrecorded = None
            if (unrecorded is None and not is_observed) or torch.compiler.is_compiling():
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            if unrecorded is not None:
                unrecorded.scalars.add_norm(total_norm)
            else:
                parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                hub.emit("clip_begin", "norm", parameters, float(max_norm), total_norm)
            inside_norm[0] += 1
            try:
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            finally:
                inside_norm[0] -= 1
                if is_observed:
                    hub.emit("clip_end")

        return scale

    def wrap_measure(original: Any) -> Any:
        @functools.wraps(original)
        def measure(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not hub.active or torch.compiler.is_compiling():
                return original(tensors, *args, **kwargs)
            listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            hub.emit("norm_begin")
            inside_norm[0] += 1
            try:
                return original(listed, *args, **kwargs)
            except RuntimeError:
                # error_if_nonfinite: the step is about to be lost, but its gradients are here.
                hub.emit("clip_begin", "refused", listed, float("nan"), None)
                hub.emit("clip_end")
                raise
            finally:
                inside_norm[0] -= 1
                hub.emit("norm_end")

        return measure

    def wrap_group(original: Any) -> Any:
        @functools.wraps(original)
        def group(lists: Any, *args: Any, **kwargs: Any) -> Any:
            if not inside_norm[0] and not torch.compiler.is_compiling():
                if hub.active:
                    _report_caller(hub, sys._getframe(1), lists[0])  # the only place that knows the value
                elif hub.unrecorded is not None and not (hub.training.others and hub.training.is_elsewhere):
                    frame = sys._getframe(1)
                    if frame.f_code.co_name == _SCALES:
                        hub.unrecorded.scalars.add_norm(frame.f_locals["total_norm"])
            return original(lists, *args, **kwargs)

        return group

    for name, wrap in (
        (_SCALES, wrap_scale),
        ("_get_total_norm", wrap_measure),
        (_GROUP, wrap_group),
    ):
        patches.replace(clip_grad, name, wrap)


def _report_caller(hub: Hub, frame: FrameType, grads: Any) -> None:
    """Report a clipping function that reached the grouping by a name imported before watching."""
    values = frame.f_locals
    if frame.f_code.co_name == "clip_grad_value_":
        hub.emit("clip_begin", "value", list(grads), float(values["clip_value"]), None)
    elif frame.f_code.co_name == _SCALES:
        # Not its parameters: a generator of them is exhausted by now.
        hub.emit("clip_begin", "norm", list(grads), float(values["max_norm"]), values["total_norm"])
    else:
        return
    hub.emit("clip_end")


def install_fsdp_clipping(hub: Hub, patches: Patches) -> None:
    """Report the clipping of FSDP1, whose norm is known only once the gradients have changed."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def clip_grad_norm_(self: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if not hub.active or not _is_sharded(self):  # else torch's own function follows
                return original(self, max_norm, *args, **kwargs)
            own = [p for p in self.parameters() if p.grad is not None]
            hub.emit("clip_nears", own)
            norm = original(self, max_norm, *args, **kwargs)
            hub.emit("clip_begin", "norm", own, float(max_norm), norm.detach())
            hub.emit("clip_end")
            return norm

        return clip_grad_norm_

    patches.replace(sys.modules[FSDP].FullyShardedDataParallel, "clip_grad_norm_", wrap)


def _is_sharded(model: Any) -> bool:
    handles = getattr(model, "_all_handles", None) or ()
    return any(getattr(handle, "uses_sharded_strategy", False) for handle in handles)
