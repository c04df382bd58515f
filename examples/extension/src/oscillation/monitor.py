"""A monitor: the share of gradient entries whose sign is not that of the recorded step before."""

from __future__ import annotations

import torch

from backlight.monitor import Gradients, Monitor, RunHandle
from backlight.session.step_recorder import StepRecord
from oscillation.settings import OscillationSettings


class OscillationMonitor(Monitor):
    """Compares the signs of each gradient with those of the recorded step before."""

    name = "oscillation"
    records = "changes of sign"

    def attach(self, run: RunHandle) -> None:
        """Start without anything to compare with."""
        self._before: dict[int, torch.Tensor] = {}
        self._smallest = OscillationSettings.of(run.settings).smallest

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Add the share of changed signs; it stays on its device, so that nothing here waits."""
        changed, total = [], 0
        for row, gradient in zip(gradients.rows, gradients.tensors, strict=True):
            if gradient is None:
                continue
            values = gradient.detach()
            signs = torch.sign(values) * (values.abs() >= self._smallest)
            before = self._before.get(row)
            if before is not None and before.shape == signs.shape:
                changed.append((signs * before < 0).sum())
                total += signs.numel()
            self._before[row] = signs
        if changed:  # not measured is not 0
            record.add_scalars({"oscillation/flipped": torch.stack(changed).sum() / total})
