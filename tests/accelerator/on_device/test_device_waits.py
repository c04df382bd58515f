"""Lines at which the host waits for an asynchronous device, from the samples of a watched run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import simulated
import torch

import backlight
from backlight.monitors.steptime.model.step_line import sampled_lines

ROUNDS = 12


def train(path: Path, wait: Callable[[torch.Tensor], object]) -> dict[str, int]:
    """Return the samples of each wait for the device in a loop whose device takes long for each step."""
    model = torch.nn.Linear(4, 1).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=path, monitors=("stalls",), quiet=True):
        for _ in range(ROUNDS):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4, device="sim")).sum()
            loss.backward()
            optimizer.step()
            simulated.sleep(0.4)
            wait(loss)
    waits: dict[str, int] = {}
    for line in sampled_lines(backlight.open_run(path)):
        if line.waits:
            assert line.line.startswith(f"{__file__}:")
            waits[line.waits] = waits.get(line.waits, 0) + line.samples
    return waits


@pytest.mark.parametrize(
    ("wait", "name"),
    [(lambda loss: loss.item(), "item"), (lambda loss: loss.to("cpu"), "to"), (lambda loss: loss > 0, "")],
    ids=["item", "to", "launch"],
)
def test_a_host_that_waits_for_the_device_is_named_with_its_function(
    wait: Callable[[torch.Tensor], object], name: str, tmp_path: Path
) -> None:
    assert set(train(tmp_path / "run", wait)) == {name} - {""}
