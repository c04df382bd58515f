"""Facts of runs of a few steps: one whole step is enough for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.findings.evaluate import findings_of
from backlight.records import Severity


class Net(nn.Module):
    """Thirteen layers, 26 parameters, of which ``unused`` layers are not called."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(13))
        self.used = 13 - unused

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.used]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.slow  # it starts the watchdog process
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("unused", [0, 4])
def test_parameters_without_a_gradient_are_a_finding_of_a_short_run(
    steps: int, unused: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Net(unused)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with backlight.watch(model, run=tmp_path / "run"):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).pow(2).mean().backward()
            optimizer.step()
    findings = findings_of(backlight.open_run(tmp_path / "run"))
    if not unused:
        assert [f.title for f in findings if f.severity is not Severity.INFO] == []
        return
    (finding,) = [f for f in findings if f.rule == "no_gradient"]
    assert finding.severity is Severity.WARNING
    assert "8 of 26" in f"{finding.title} {finding.detail}"
    assert finding.subject.parameter in {
        f"layers.{i}.{part}" for i in range(9, 13) for part in ("weight", "bias")
    }
