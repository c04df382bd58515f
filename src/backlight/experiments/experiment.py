"""The record of an experiment: its paper, published and small settings, and what builds its task.

An experiment is one file in ``experiments/published``: its settings, in the sections ``data``, ``model`` and
``training``, and ``build``, which makes a :class:`backlight.experiments.task.Task` of settings and a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from backlight.registry import Registry

if TYPE_CHECKING:
    import torch

    from backlight.experiments.task import Task

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
    """Number of training steps, and of steps between two evaluations, cheap and thorough."""

    steps: int = 100_000
    log_every: int = 100
    thorough_every: int = 1000


@dataclass(frozen=True)
class Setup(Generic[D, M, T]):
    """Hyperparameters of an experiment: three frozen dataclasses; ``training`` is a :class:`Duration`."""

    data: D
    model: M
    training: T


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

Build = TypeVar("Build", bound=Callable[..., Any])


def experiment(
    name: str, title: str, paper: Paper, *, settings: Any, ci: Any, **expected: str
) -> Callable[[Build], Build]:
    """Register an experiment with the decorated function as its ``build``; see :class:`Experiment`."""

    def register(build: Build) -> Build:
        EXPERIMENTS.add(name, Experiment(name, title, paper, settings, ci, build, **expected))
        return build

    return register
