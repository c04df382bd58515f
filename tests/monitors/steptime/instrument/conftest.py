"""What the tests of kept graphs and of kept data share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def marked_line() -> Callable[[Any], str]:
    """Return a function that gives the line of a source that is marked with HERE, as ``file.py:12``."""

    def find(source: Any) -> str:
        lines, first = inspect.getsourcelines(source)
        (line,) = (first + n for n, text in enumerate(lines) if "# HERE" in text)
        return f"{Path(inspect.getfile(source)).name}:{line}"

    return find
