"""The interface of an experiment: published settings as data, and a task that can be trained and resumed.

An experiment is one file in ``experiments/published``: its settings, in the sections ``data``, ``model`` and
``training``, and ``build``, which makes a task of settings and a seed. Everything that training changes is in
the task's model, optimizer, scheduler and ``extra_state``, and the batch of a step depends on seed and step
alone, so that a resumed run gives the numbers of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from backlight.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

S = TypeVar("S")
D = TypeVar("D")
M = TypeVar("M")
T = TypeVar("T")


@dataclass(frozen=True)
class Paper:
    """The publication of an experiment, its claim, and what the source leaves open (``unclear``)."""

    arxiv: str
    title: str
    authors: str
    claim: str
    unclear: str = ""


@dataclass(frozen=True)
class Duration:
    """How many steps are trained, and how many lie between two evaluations, cheap and thorough."""

    steps: int = 100_000
    log_every: int = 100
    thorough_every: int = 1000


@dataclass(frozen=True)
class Settings(Generic[D, M, T]):
    """Hyperparameters of an experiment: three frozen dataclasses; ``training`` is a :class:`Duration`."""

    data: D
    model: M
    training: T


@dataclass(frozen=True)
class Facts:
    """Facts of a task that a verdict needs.

    ``chance`` is the accuracy of guessing; ``train_size`` and ``test_size`` count samples. A task
    without accuracies (a regression) defines its own, and says so in ``accuracy``.
    """

    chance: float
    train_size: int
    test_size: int
    accuracy: str = "share of samples whose largest output is the label"


class Task(Protocol):
    """An experiment ready to train.

    Attributes
    ----------
    model, optimizer:
        The optimizer holds every trainable parameter.
    scheduler:
        Stepped once after each optimizer step; None for a constant learning rate.
    facts:
        What a verdict needs.
    probe:
        A fixed batch of N training samples, tensors with samples along the first dimension: what
        per-sample gradients are taken of.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    facts: Facts
    probe: Any

    def batch(self, step: int) -> Any:
        """Return the training batch of ``step``, a function of seed and step alone."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the training loss of ``batch``, as the paper reduces it."""

    def sample_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss summed over samples, whose gradient is the sum of per-sample gradients."""

    def inputs(self, batch: Any) -> torch.Tensor | None:
        """Return the real-valued input of ``batch`` for the input AGOP; None where it has none."""

    def evaluate(self, *, thorough: bool) -> Mapping[str, float]:
        """Return what is logged, without touching gradients, buffers or random state.

        Always ``train_loss``, ``test_loss``, ``train_accuracy``, ``test_accuracy``; progress
        measures as ``progress/<name>``, the costly ones only where ``thorough``. What cannot be
        measured at this step is left out, never 0.
        """

    def before_step(self, step: int) -> None:
        """Do what the experiment does at set steps (prune, rewind, change a rate); often nothing."""

    def extra_state(self) -> Mapping[str, Any]:
        """Return tensors and plain values, beyond model and optimizer, that a resumed task needs."""

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`extra_state` returned."""


@dataclass(frozen=True)
class Experiment(Generic[S]):
    """A published experiment.

    ``settings`` are the published ones, ``ci`` small ones that show the effect in seconds to minutes on
    one core. ``build(settings, seed, device, control)`` makes the task; ``control`` is ""
    or ``"random-labels"``, the same run with the training and test labels shuffled by the seed.
    ``effect`` names what the paper claims in a few words; ``bench/grokking_experiments.py`` checks it.
    ``expects`` is the verdict that this claim implies, "" where it is not one of late accuracy;
    ``ci_expects`` is the verdict that the ci preset gives in most seeds, which may differ.
    """

    name: str
    title: str
    paper: Paper
    settings: S
    ci: S
    build: Callable[[S, int, torch.device, str], Task]
    effect: str = "late generalisation"
    expects: str = "grokking"
    ci_expects: str = "grokking"


EXPERIMENTS: Registry[Experiment[Any]] = Registry(
    "experiment", modules=("experiments/published/*.py",), group="backlight.experiments", holds=Experiment
)


def register(experiment: Experiment[S]) -> Experiment[S]:
    """Add ``experiment`` to the registry under its own name and return it."""
    EXPERIMENTS.add(experiment.name, experiment)
    return experiment
