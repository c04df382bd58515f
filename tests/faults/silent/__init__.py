"""Errors of a training loop that crash nothing, and loops without an error that come close to one."""

from faults.silent import (
    batches,
    gradients,
    losses,
    microbatches,
    mixed_precision,
    modules,
    optimizers,
    weights,
)
from faults.silent.loop import CONTROLS, FAULTS

__all__ = ["CONTROLS", "FAULTS"]

SUBJECTS = (batches, gradients, losses, microbatches, mixed_precision, modules, optimizers, weights)
"""The modules whose import fills both."""
