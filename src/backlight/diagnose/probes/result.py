"""What a probe of a step found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Probe(StrEnum):
    """What is asked of a step."""

    FUTURE = "future"
    TARGETS = "targets"
    THROUGH_TIME = "through-time"
    SAMPLES = "samples"
    OVERFIT = "overfit"
    LABELS = "labels"
    RECOMPUTATION = "recomputation"
    INPUTS = "inputs"
    FIRST_LOSS = "first-loss"
    FROZEN = "frozen"
    GRADIENTS = "gradients"
    ADAPTERS = "adapters"


class ProbeOutcome(StrEnum):
    """``FAILED`` is a fact that contradicts what the probe asks for."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"
    NOT_PROBED = "not probed"


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of a probe, the measurement or the reason behind it, and why the project accepts it."""

    probe: Probe
    outcome: ProbeOutcome
    text: str
    accepted: str = ""

    @property
    def fails(self) -> bool:
        """Whether it has failed, and the project does not accept that."""
        return self.outcome is ProbeOutcome.FAILED and not self.accepted
