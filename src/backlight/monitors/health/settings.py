"""The settings of the monitor health."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from backlight.settings import MonitorSettings, Option, SettingError


def _steps(steps: int | Iterable[int]) -> tuple[int, ...]:
    return (steps,) if isinstance(steps, int) else tuple(steps)


@dataclass(frozen=True)
class HealthSettings(MonitorSettings):
    """What is measured beyond the statistics of gradients."""

    name: ClassVar[str] = "health"

    histogram: Annotated[bool, Option("Record exponent histograms at every recorded step.")] = False
    exact_updates: Annotated[
        int | None,
        Option(
            "Measure updates over all weights at every Nth recorded step (default: a sample, every 4th).",
            at_least=1,
        ),
    ] = None
    per_backward: Annotated[
        bool, Option("Record the gradients after every backward pass of an accumulation as well.")
    ] = False
    decompose: Annotated[
        tuple[int, ...],
        Option("Steps to decompose by samples: one more forward pass each.", parse=_steps),
    ] = ()

    def __post_init__(self) -> None:
        """Check the bounds."""
        super().__post_init__()
        if self.decompose and min(self.decompose) < 0:
            raise SettingError(
                "health.decompose", f"{min(self.decompose)}: expected numbers of steps from 0 on"
            )
