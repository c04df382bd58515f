"""A probe: the share of gradient entries whose sign is not that of the recorded step before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backlight.registry import Needs, probe


@probe("oscillation", monitor="health", needs=Needs.GRADIENTS)
class Oscillation:
    """Keeps the signs of one step; one made for each watched training."""

    def __init__(self) -> None:
        self._before: dict[int, torch.Tensor] = {}

    def measure(
        self, tensors: Sequence[torch.Tensor | None], scale: Any, carrier: Any
    ) -> dict[str, torch.Tensor]:
        """Return scalars; they are stored as ``oscillation/<name>``.

        Tensors stay on their device: nothing here waits for it.
        """
        flipped, total = [], 0
        for place, gradient in enumerate(tensors):
            if gradient is None:
                continue
            signs = torch.sign(gradient.detach())
            before = self._before.get(place)
            if before is not None and before.shape == signs.shape:
                flipped.append((signs * before < 0).sum())
                total += signs.numel()
            self._before[place] = signs
        if not flipped:
            return {}  # not measured is not 0
        return {"flipped": torch.stack(flipped).sum() / total}
