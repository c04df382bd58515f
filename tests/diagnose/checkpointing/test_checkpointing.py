"""Checkpointed regions: mode and line of each, remarks on injected faults, silence on controls."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch.utils.checkpoint

from answers import Command
from backlight.capture.hub import HUB
from backlight.diagnose.checkpointing.observer import CheckpointObserver, Region
from cases import CASES, assert_equal
from faults.checkpointing import FAULTS
from faults.injection import Fault, Train, end, run_under


def inspect(train: Train, injected: bool) -> Region:
    before = torch.utils.checkpoint.checkpoint
    observer = CheckpointObserver(2, end)
    run_under(observer, train, injected)
    assert torch.utils.checkpoint.checkpoint is before
    assert not HUB.active
    return observer.regions[0]


EACH = pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))


@EACH
def test_remarks(fault: Fault) -> None:
    region = inspect(fault.train, injected=True)
    expected = fault.expected
    assert {remark.kind for remark in region.remarks} == expected["kinds"]
    texts = [remark.text for remark in region.remarks]
    assert any(re.search(expected["text"], text) for text in texts), texts
    assert region.reentrant is expected.get("reentrant", False)
    if fault.line is not None:
        assert fault.line in {remark.line.number for remark in region.remarks}


@EACH
def test_control_is_silent(fault: Fault) -> None:
    region = inspect(fault.train, injected=False)
    assert region.remarks == []
    assert region.calls >= 2
    assert region.recomputations >= 2


@pytest.mark.parametrize(
    "name", ["checkpointing", "checkpointing_reentrant", "plain", "accumulation", "lbfgs"]
)
def test_cases_stay_bit_identical(name: str) -> None:
    case = CASES[name]
    plain = case.train()
    observer = CheckpointObserver(10**6, lambda: None)
    with observer:
        watched = case.train()
    assert_equal(plain, watched)
    assert [region.remarks for region in observer.regions if region.remarks] == []


SCRIPT = """
import torch
from torch.utils.checkpoint import checkpoint
first, norm, last = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD([*first.parameters(), *norm.parameters(), *last.parameters()], lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    hidden = checkpoint(norm, first(torch.randn(6, 4)), use_reentrant=False)
    last(hidden).mean().backward()
    optimizer.step()
"""


def test_command(tmp_path: Path, command: Command) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, out, errors = command("check", "--recompute", "--fail-on", "any", "--json", "train.py")
    assert code == 1, errors
    (region,) = json.loads(out)["regions"]
    assert region["line"]["number"] == 8
    assert (region["reentrant"], region["calls"], region["recomputations"]) == (False, 3, 2)
    assert {remark["kind"] for remark in region["remarks"]} == {"state"}
