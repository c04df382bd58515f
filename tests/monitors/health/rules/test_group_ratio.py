from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

GROUPS = {"host": "host.*", "graft": "graft"}


def rms_of(host: float, graft: Any, steps: int = 40) -> dict[str, Any]:
    return {"host.0.w": [host] * steps, "host.1.w": [host] * steps, "graft.w": np.broadcast_to(graft, steps)}


def test_ratio_out_of_bounds_is_found_in_both_directions(synthetic: Any, evaluated: Any) -> None:
    for graft, host, quotient in ((1e-6, 1e-2, 1e4), (1e-2, 1e-6, 1e-4)):
        (finding,) = evaluated(synthetic(rms_of(host, graft), groups=GROUPS), "group_ratio")
        assert finding.evidence[0].value / finding.evidence[1].value == pytest.approx(quotient)
    (dead,) = evaluated(synthetic(rms_of(1e-2, 0.0), groups=GROUPS), "group_ratio")
    assert dead.evidence[1].value == 0.0


def test_healthy_ratios_have_no_finding(synthetic: Any, evaluated: Any) -> None:
    flickers = np.where(np.arange(40) % 3, 1e-2, 1e-6)
    for run in (
        synthetic(rms_of(1e-2, 1e-3), groups=GROUPS),
        synthetic(rms_of(1e-2, flickers), groups=GROUPS),
        synthetic(rms_of(0.0, 0.0), groups=GROUPS),  # undefined: left to zero_gradient
        synthetic(rms_of(1e-2, 1e-6, steps=19), groups=GROUPS),
        synthetic(rms_of(1e-2, 1e-6)),
    ):
        assert not evaluated(run, "group_ratio")


def test_group_without_parameters_is_reported(synthetic: Any, evaluated: Any) -> None:
    (finding,) = evaluated(
        synthetic(rms_of(1e-2, 1e-2), groups={"host": "host", "gift": "grafd.*"}), "group_ratio"
    )
    assert finding.subject.module == "gift"


class Grafted(nn.Module):
    def __init__(self, damping: float) -> None:
        super().__init__()
        self.host, self.graft, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.damping = damping

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.host(x)) + self.damping * torch.relu(self.graft(x)))


def train(recorder: Any, damping: float) -> Any:
    model = Grafted(damping)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return recorder(model, optimizer, groups=GROUPS | {"host": "host"}).classify(optimizer, 30, inputs=8)


def test_damped_graft_is_found_and_its_control_is_not(recorder: Any, evaluated: Any) -> None:
    (finding,) = evaluated(train(recorder, 1e-4), "group_ratio")
    assert finding.subject.module == "host/graft"
    assert not evaluated(train(recorder, 1.0), "group_ratio")
