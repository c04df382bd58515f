"""Options of ``backlight spectra``, and its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from backlight import devices
from backlight.distributed import world
from backlight.measure.spectra.decomposition import Method
from backlight.monitors.spectra.settings import SpectraError

BUDGET_BYTES = 2 * 10**9
"""Bytes of replicates on a rank, by default."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class SpectraRequest:
    """Options of a measurement; the fields are those of ``backlight spectra``."""

    recipe: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Sequence[str] = ()
    replicates: int = 16
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    method: str = "auto"
    max_directions: int | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    budget: int = BUDGET_BYTES
    out: Path | None = None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Type of model and floating inputs, None as the recipe has them."""
        return None if self.dtype is None else DTYPES[self.dtype]

    def check(self) -> None:
        """Raise SpectraError for options that cannot be used."""
        if self.method not in get_args(Method):
            raise SpectraError(f"--method {self.method}: expected one of {', '.join(get_args(Method))}")
        if self.replicates < 3:
            raise SpectraError(f"--replicates {self.replicates}: at least 3 are needed, 8 or more are better")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SpectraError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}")

    def find_device(self) -> torch.device | None:
        """Return a usable device, by default an accelerator if there is one; None for that of the recipe."""
        name = self.device or devices.kind()
        if name is None:
            return None
        try:
            device = torch.device(name)
            if name == devices.kind():
                local = world().local_rank
                device = torch.device(name, local % max(1, devices.count()))
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            first = str(error).strip().splitlines()[0]
            raise SpectraError(f"--device {name}: cannot be used here: {first}") from error
        return device


@dataclass(frozen=True)
class SpectraProgress:
    """Progress of a measurement: ``done`` of ``total`` layers over all checkpoints, and the current work."""

    done: int
    total: int
    text: str
