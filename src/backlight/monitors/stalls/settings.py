"""The settings of the monitor stalls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from backlight.settings import MonitorSettings, Option, SettingError

KINDS = ("gradients", "modules", "buckets")
"""What can be traced."""

VARIABLE = "BACKLIGHT_TRACE"
"""Environment variable with the value of ``stalls.trace``, for clusters where no option can be passed."""


def traced_kinds(
    option: str | tuple[str, ...] | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return what to trace, as given or by the environment variable; SettingError for an unknown kind."""
    source = "stalls.trace"
    if option is None:
        option, source = environment.get(VARIABLE, ""), VARIABLE
    kinds = (
        tuple(k.strip() for k in option.split(",") if k.strip()) if isinstance(option, str) else tuple(option)
    )
    for kind in kinds:
        if kind not in KINDS:
            raise SettingError(source, f"cannot trace {kind!r}; expected some of {','.join(KINDS)}")
    return kinds


@dataclass(frozen=True)
class StallsSettings(MonitorSettings):
    """When a step that does not move is looked at, and what is traced."""

    name: ClassVar[str] = "stalls"
    without_monitor: ClassVar[frozenset[str]] = frozenset({"trace"})

    after: Annotated[
        float | None,
        Option(
            "Seconds without progress until a diagnosis (default: follows the run).",
            flags=("--stall",), metavar="SECONDS", at_least=0.5,
        ),
    ] = None  # fmt: skip
    trace: Annotated[
        tuple[str, ...],
        Option("Trace of the backward pass: gradients,modules,buckets.", parse=traced_kinds),
    ] = field(default_factory=traced_kinds)

    def __post_init__(self) -> None:
        """Check the bounds and the kinds."""
        super().__post_init__()
        traced_kinds(self.trace)
