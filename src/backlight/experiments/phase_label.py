"""The phase of a training, for a progress bar: a word for where the accuracies stand now, no verdict."""

from __future__ import annotations

import enum
import math

FITTED = 0.99
GENERALISED = 0.95


class LearningPhase(enum.StrEnum):
    """What the two accuracies say at one log."""

    MEMORISING = "memorising"
    MEMORISED = "memorised"
    GENERALISING = "generalising"
    GENERALISED = "generalised"
    UNKNOWN = "no accuracies"


def phase(train: float, test: float, chance: float) -> LearningPhase:
    """Return the phase: fitted from .99 on; generalising from halfway between chance and .95 on."""
    if not (math.isfinite(train) and math.isfinite(test)):
        return LearningPhase.UNKNOWN
    if test >= GENERALISED:
        return LearningPhase.GENERALISED
    if test >= chance + 0.5 * (GENERALISED - chance):
        return LearningPhase.GENERALISING
    return LearningPhase.MEMORISED if train >= FITTED else LearningPhase.MEMORISING
