"""Passes through a model that leave it as it was: buffers, training mode, random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from backlight.capture.hub import HUB


class Untouched:
    """What a model was before a pass, and whether the pass drew random numbers."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        devices = {parameter.device for parameter in model.parameters()}
        self.devices = [device for device in devices if device.type == "cuda"]
        self.states = self._random()

    def _random(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.devices)]

    @property
    def drew(self) -> bool:
        """Whether random numbers were drawn since."""
        return not all(map(torch.equal, self.states, self._random()))

    def rewind(self, states: Sequence[torch.Tensor] | None = None) -> None:
        """Put the random state back, or put ``states`` of an earlier one in its place."""
        first, *others = states or self.states
        torch.set_rng_state(first)
        for device, state in zip(self.devices, others, strict=True):
            torch.cuda.set_rng_state(state, device)

    def restore(self) -> None:
        """Put buffers, training modes and random state back."""
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
        for module, training in self._modes:
            module.training = training
        self.rewind()


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[Untouched]:
    """Restore buffers, training modes and random state of ``model`` at the end; nobody is told of passes."""
    state = Untouched(model)
    try:
        with HUB.aside():
            yield state
    finally:
        state.restore()
