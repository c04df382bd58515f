"""State that a checkpointed region reads beside its arguments: buffers, attributes, random numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN_VALUES = (bool, int, float, str, type(None))


@dataclass
class Snapshot:
    """State at one moment, by the name of what holds it; values compare by equality."""

    buffers: dict[str, tuple[int, float]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    random: str = ""


def checksum(tensor: Tensor) -> float:
    """Return the sum of magnitudes in fp64; NaN for what cannot be summed."""
    part = getattr(tensor, "_local_tensor", None)
    values = (tensor if part is None else part).detach()
    if values.layout is not torch.strided or values.device.type == "meta" or not values.numel():
        return 0.0
    if values.is_complex():
        values = values.abs()
    return float(values.double().abs().sum())


def random_state() -> str:
    """Return a digest of the random states that checkpointing restores."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        for state in cuda.get_rng_state_all():
            digest.update(state.numpy().tobytes())
    return digest.hexdigest()


def snapshot(modules: Iterable[nn.Module], names: dict[int, str]) -> Snapshot:
    """Return the state of ``modules`` and of the random generators as they are now."""
    found = Snapshot(random=random_state())
    for module in modules:
        name = names.get(id(module), type(module).__name__)
        for key, buffer in (vars(module).get("_buffers") or {}).items():
            if buffer is not None:
                found.buffers[f"{name}.{key}"] = (buffer._version, checksum(buffer))
        for key, parameter in (vars(module).get("_parameters") or {}).items():
            if parameter is not None:
                found.parameters[f"{name}.{key}"] = parameter._version
        for key, value in vars(module).items():
            # type() first: equality on a stranger may be anything.
            if type(value) in _PLAIN_VALUES and (not key.startswith("_") or key == "training"):
                found.attributes[f"{name}.{key}"] = value
    return found


def differences(forward: Snapshot, again: Snapshot, after: Snapshot) -> list[str]:
    """Return in words what was not the same when the recomputation began as when the forward began.

    Parameters
    ----------
    forward, again, after:
        State at the begin of the forward, at the begin and at the end of the recomputation.
    """
    found = []
    for name, (version, total) in forward.buffers.items():
        now = again.buffers.get(name)
        if now is None or (now[0] == version and _same(now[1], total)):
            continue
        later = after.buffers.get(name, now)
        twice = "; the recomputation updates it a second time" if later != now else ""
        found.append(f"buffer {name} is updated between forward and recomputation{twice}")
    for name, version in forward.parameters.items():
        if again.parameters.get(name, version) != version:
            found.append(f"parameter {name} was changed before the recomputation, as by an optimizer step")
    for name, value in forward.attributes.items():
        now = again.attributes.get(name, value)
        if now != value:
            found.append(f"attribute {name} was {value!r} in forward and is {now!r} in the recomputation")
    return found


def _same(one: float, two: float) -> bool:
    return one == two or (math.isnan(one) and math.isnan(two))
