"""A part of a long table on its way into a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Chunk:
    """Columns of equal length; ``void[name]`` is True where there is no value."""

    columns: dict[str, npt.NDArray[Any]]
    void: dict[str, npt.NDArray[np.bool_]]
