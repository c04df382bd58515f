"""What other tests of the process have compiled does not count; what some releases of torch do not show."""

from __future__ import annotations

import sys

import pytest
from torch._dynamo.utils import counters

from backlight.capture.loss_graph import SHOWS_HOOKS


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    counters.clear()


@pytest.fixture(autouse=True)
def no_distributed_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the module where another test has imported it: it loads into a module's own tensors."""
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint", raising=False)


@pytest.fixture
def read_targets() -> None:
    """Skip where the number of targets of a loss cannot be read."""
    if not SHOWS_HOOKS:
        pytest.skip("this torch does not show the hooks of saved tensors, so none of a loss is read")
