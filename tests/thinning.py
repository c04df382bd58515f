"""What of a long list `make test` runs: every so many of it, the rest being `full`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thinned(values: Iterable[Any], every: int = 4) -> Sequence[Any]:
    """Return ``values`` as parameters, of which all but each ``every``-th carry the marker ``full``.

    For lists that other tests go through as a whole, so that the few that stay show the mechanism.
    """
    return [
        value if index % every == 0 else pytest.param(value, marks=pytest.mark.full)
        for index, value in enumerate(values)
    ]
