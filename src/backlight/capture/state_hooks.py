"""Hooks on torch that report to the hub: loaded state, averages, modes, schedules, seeds, autocast.

Not captured: a script that imported ``load`` by name before watching began, and formats of other libraries.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub


def install_loading(hub: Hub, patches: Patches) -> None:
    """Report ``torch.load``, ``load_state_dict`` of modules and optimizers, and ``to_empty``, once over."""
    depth = [0]

    def reporting(event: str, original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            if hub.unrecorded is not None:
                hub.resume()
            if not hub.active or depth[0] or torch.compiler.is_compiling():
                return original(self, state_dict, *args, **kwargs)
            depth[0] += 1
            # Afterwards a state that is assigned is that of the module as well.
            is_own = event == "state_loaded" and _holds_all(self, state_dict)
            try:
                result = original(self, state_dict, *args, **kwargs)
            finally:
                depth[0] -= 1
            if is_own:
                hub.emit("own_state_loaded", self)
            hub.emit(event, self, state_dict, result)
            return result

        return load_state_dict

    def wrap_load(original: Any) -> Any:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if hub.unrecorded is not None:
                hub.resume()
            if hub.active:
                hub.emit("loaded", value)
            return value

        return load

    def wrap_to_empty(original: Any) -> Any:
        @functools.wraps(original)
        def to_empty(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if hub.active:
                hub.emit("emptied", self)
            return result

        return to_empty

    patches.replace(torch, "load", wrap_load)
    patches.replace(nn.Module, "to_empty", wrap_to_empty)
    patches.replace(nn.Module, "load_state_dict", functools.partial(reporting, "state_loaded"))
    patches.replace(
        torch.optim.Optimizer, "load_state_dict", functools.partial(reporting, "optimizer_loaded")
    )


def _holds_all(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether the state has every parameter of the module as its value: the same memory."""
    parameters = list(module.named_parameters()) if isinstance(state, Mapping) else []
    return bool(parameters) and all(_is_same(state.get(name), parameter) for name, parameter in parameters)


def _is_same(value: Any, parameter: nn.Parameter) -> bool:
    is_plain = type(value) in {torch.Tensor, nn.Parameter} and not parameter.is_meta
    is_whole = is_plain and value.numel() == parameter.numel() > 0
    return is_whole and value.data_ptr() == parameter.data_ptr()


def install_averages(hub: Hub, patches: Patches) -> None:
    """Report the updates of averages of weights, and count them without reading a device."""
    counts: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def update_parameters(self: Any, model: Any) -> None:
            if not torch.compiler.is_compiling():
                if hub.active:
                    hub.emit("averaged", self, counts.get(self, 0))
                counts[self] = counts.get(self, 0) + 1
            original(self, model)

        return update_parameters

    patches.replace(AveragedModel, "update_parameters", wrap)


def install_modes(hub: Hub, patches: Patches) -> None:
    """Note of which modules ``train`` was called, which ``eval`` calls as well."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def train(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                hub.seen.note_mode(self)
            return original(self, *args, **kwargs)

        return train

    patches.replace(nn.Module, "train", wrap)


def install_schedules(hub: Hub, patches: Patches) -> None:
    """Report new schedules, and every step that a script takes; the one in its construction is none."""

    def wrap_init(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            if hub.active and not torch.compiler.is_compiling():
                # A OneCycleLR keeps only the product of its arguments.
                hub.emit("schedule_made", self, sys._getframe(1).f_locals.get("steps_per_epoch"))

        return __init__

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if hub.active and not getattr(self, "_is_initial", False) and not torch.compiler.is_compiling():
                hub.emit("schedule_end", self)
            return result

        return step

    def wrap_plateau(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, metrics, *args, **kwargs)
            is_number = isinstance(metrics, (int, float, torch.Tensor))
            if hub.active and is_number and not torch.compiler.is_compiling():
                hub.emit("plateau_end", self, metrics)
            return result

        return step

    patches.replace(LRScheduler, "step", wrap)
    patches.replace(ReduceLROnPlateau, "step", wrap_plateau)
    patches.replace(LRScheduler, "__init__", wrap_init)


MAX_SEEDS = 16
"""Seeds that end a stretch of unrecorded steps: some loops set one in every step."""


def install_random(hub: Hub, patches: Patches) -> None:
    """Report where a script sets the seed or the state of the global generator."""
    seeds = [0]

    def wrap_seed(original: Any) -> Any:
        @functools.wraps(original)
        def manual_seed(seed: Any) -> Any:
            result = original(seed)
            if torch.compiler.is_compiling():
                return result
            if hub.unrecorded is not None and seeds[0] < MAX_SEEDS:
                hub.resume()
            if hub.active:
                seeds[0] += 1
                hub.emit("seeded", int(seed))
            return result

        return manual_seed

    def wrap_state(original: Any) -> Any:
        @functools.wraps(original)
        def set_rng_state(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if hub.active and not torch.compiler.is_compiling():
                hub.emit("random_state_set")

        return set_rng_state

    patches.replace(torch, "manual_seed", wrap_seed)
    patches.replace(torch, "set_rng_state", wrap_state)


def install_autocast(hub: Hub, patches: Patches) -> None:
    """Report where an outermost region of autocast that is enabled begins and ends."""
    depth = [0]

    def wrap_enter(original: Any) -> Any:
        @functools.wraps(original)
        def __enter__(self: Any) -> Any:  # noqa: N807
            result = original(self)
            if not torch.compiler.is_compiling() and getattr(self, "_enabled", False):
                depth[0] += 1
                if depth[0] == 1 and hub.active:
                    hub.emit("autocast_begin", self)
            return result

        return __enter__

    def wrap_exit(original: Any) -> Any:
        @functools.wraps(original)
        def __exit__(self: Any, *args: Any) -> Any:  # noqa: N807
            if not torch.compiler.is_compiling() and getattr(self, "_enabled", False):
                depth[0] = max(depth[0] - 1, 0)
                if not depth[0] and hub.active:
                    hub.emit("autocast_end", self)
            return original(self, *args)

        return __exit__

    patches.replace(torch.autocast, "__enter__", wrap_enter)
    patches.replace(torch.autocast, "__exit__", wrap_exit)
