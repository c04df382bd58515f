"""What other tests of the process have compiled does not count."""

from __future__ import annotations

import pytest
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    counters.clear()
