"""Python's random generator, kept where code of backlight runs between the lines of a script."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator


@contextlib.contextmanager
def kept_random() -> Iterator[None]:
    """Leave the generator as it was: rich draws from it when it is imported."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
