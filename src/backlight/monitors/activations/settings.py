"""The settings of the monitor activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from backlight.settings import MonitorSettings, Option


@dataclass(frozen=True)
class ActivationsSettings(MonitorSettings):
    """Which steps are measured, and what is measured on request."""

    name: ClassVar[str] = "activations"

    every: Annotated[
        int | None,
        Option(
            "Measure every Nth step (default: 0, the powers of two up to 32, every 64th or rarer).",
            at_least=1,
        ),
    ] = None
    rank: Annotated[bool, Option("Measure the effective rank of each output as well.")] = False
