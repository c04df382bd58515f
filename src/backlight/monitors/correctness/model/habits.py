"""What the loop of a run did at its first steps, by which runs of it can be compared. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.monitors.correctness.model.facts import Fact


@dataclass(frozen=True)
class GivenTensor:
    """One tensor that the model was given at the first forward of each of some steps.

    ``samples`` are its smallest and its largest first dimension; ``mean`` and ``rms`` are over a sample of
    the values of those steps, and None of integers, of which the largest is not an amount.
    """

    dtype: str
    dimensions: int
    samples: tuple[int, int]
    mean: float | None = None
    rms: float | None = None


class Habits(Fact, event="habits"):
    """The first ``steps`` steps of a loop, which are observed one by one.

    ``orders`` counts the steps by their calls in order, such as ``forward backward clip optimizer``.
    ``modes`` counts the modules of dropout and of batch norm that are in training and in evaluation mode as
    the optimizer steps, ``losses`` the loss functions below the roots of backward. ``inputs`` are the tensors
    that the model is given, ``outputs`` the types of what it returns.
    """

    steps: int
    orders: dict[str, int]
    modes: dict[str, int]
    losses: dict[str, int]
    inputs: tuple[GivenTensor, ...]
    outputs: tuple[str, ...]
