"""Register the simulated accelerator; every test starts with an idle, undelayed one."""

from collections.abc import Iterator

import pytest
import simulated
import torch


@pytest.fixture(autouse=True)
def _idle() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    simulated.set_delay(0)
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
