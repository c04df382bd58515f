"""The settings of the monitor: one line for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from backlight.settings import MonitorSettings, Option


@dataclass(frozen=True)
class OscillationSettings(MonitorSettings):
    """Given as ``watch(oscillation={...})``, ``--set oscillation.KEY=VALUE`` or a table of a file."""

    name: ClassVar[str] = "oscillation"

    smallest: Annotated[float, Option("Smaller entries have no sign.", at_least=0)] = 0.0
