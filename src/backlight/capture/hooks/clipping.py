"""Clipping, caught inside ``torch.nn.utils.clip_grad`` so that names imported earlier are caught too.

``clip_grad_norm_`` looks up two functions of its module at every call: the one that measures the
norm and the one that scales. ``clip_grad_value_`` looks up the function that groups gradients.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

if TYPE_CHECKING:
    from backlight.capture.hooks.patch import Patches
    from backlight.capture.hub import Hub

_GROUP = "_group_tensors_by_device_and_dtype"


def install(hub: Hub, patches: Patches) -> None:
    """Report clipping by norm and by value to the hub, before the gradients change."""
    inside_norm = [0]

    def wrap_scale(original: Any) -> Any:
        @functools.wraps(original)
        def scale(
            parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if not hub.active or torch.compiler.is_compiling():
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            hub.emit("clip_begin", "norm", tensors, float(max_norm), total_norm)
            inside_norm[0] += 1
            try:
                return original(tensors, max_norm, total_norm, *args, **kwargs)
            finally:
                inside_norm[0] -= 1
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
            if hub.active and not inside_norm[0] and not torch.compiler.is_compiling():
                _report_caller(hub, sys._getframe(1), lists[0])  # the only place that knows the value
            return original(lists, *args, **kwargs)

        return group

    for name, wrap in (
        ("_clip_grads_with_norm_", wrap_scale),
        ("_get_total_norm", wrap_measure),
        (_GROUP, wrap_group),
    ):
        patches.replace(clip_grad, name, wrap)


def _report_caller(hub: Hub, frame: FrameType, grads: Any) -> None:
    """Report a clipping function that reached the grouping by a name imported before watching."""
    values = frame.f_locals
    if frame.f_code.co_name == "clip_grad_value_":
        hub.emit("clip_begin", "value", list(grads), float(values["clip_value"]), None)
    elif frame.f_code.co_name == "_clip_grads_with_norm_":
        # Not its parameters: a generator of them is exhausted by now.
        hub.emit("clip_begin", "norm", list(grads), float(values["max_norm"]), values["total_norm"])
    else:
        return
    hub.emit("clip_end")
