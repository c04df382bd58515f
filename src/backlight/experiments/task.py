"""The task of an experiment: a model with its optimizer, data and progress measures, trained and resumed.

Everything that training changes is in the model, optimizer, scheduler and ``extra_state``, and the batch of a
step depends on seed and step alone, so that a resumed run gives the numbers of an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from backlight.experiments.data.split import Split, generator
from backlight.experiments.experiment import Duration
from backlight.experiments.progress import weight_norm

Batch = tuple[Tensor, Tensor]

PROBE_SIZE = 128
"""Training samples, and as many test samples, of which per-sample gradients are taken."""

EVALUATION_CHUNK = 4096
"""Most samples in one forward pass of an evaluation."""


def cross_entropy(outputs_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, [N]."""
    return nn.functional.cross_entropy(outputs_NC, labels_N, reduction="none")


def one_hot_squared_error(outputs_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the mean over classes of the squared distance to the one-hot label, [N]."""
    target = nn.functional.one_hot(labels_N, outputs_NC.shape[1]).to(outputs_NC.dtype)
    return (outputs_NC - target).square().mean(1)


def largest_is_label(outputs_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return for each sample whether its largest output is the label, [N] bool."""
    return outputs_NC.argmax(1) == labels_N


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode without gradients, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class AdamWTraining(Duration):
    """The training section of an experiment with AdamW, whose ``weight_decay`` is decoupled.

    0 means all samples for ``batch_size``, no ``warmup`` (in updates), and no gradient clipping to the norm
    ``clip``. Without ``decay_vectors`` biases and the gains of norms do not decay.
    """

    lr: float = 1e-3
    weight_decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    batch_size: int = 0
    warmup: int = 0
    clip: float = 0.0
    decay_vectors: bool = True


def adamw(model: nn.Module, training: AdamWTraining) -> torch.optim.AdamW:
    """Return AdamW on all parameters; vectors are in a second group if they do not decay."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if not training.decay_vectors:
        groups = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(
        groups, lr=training.lr, weight_decay=training.weight_decay, betas=training.betas, eps=training.eps
    )


def clip_gradients(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], norm: float) -> None:
    """Clip gradients to a total norm of ``norm`` before each step of ``optimizer``; 0 does not clip."""
    # A hook of the step: a run records the gradient as backward left it, before clipping.
    if not (math.isfinite(norm) and norm >= 0):
        raise ValueError(f"training.clip is {norm!r}, expected a norm above 0, or 0 for no clipping")
    clipped = list(parameters)

    def clip(_optimizer: torch.optim.Optimizer, _args: Any, _keywords: Any) -> None:
        nn.utils.clip_grad_norm_(clipped, norm)

    if norm:
        optimizer.register_step_pre_hook(clip)


def linear_warmup(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return a schedule that rises linearly over ``steps`` updates and then stays; None for no steps."""
    if steps < 1:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min((done + 1) / steps, 1.0))


@dataclass
class Task:
    """A model in training on fixed samples.

    Attributes
    ----------
    model, optimizer, scheduler:
        The optimizer holds every trainable parameter; the scheduler is stepped after it, None for a constant
        learning rate.
    chance:
        Accuracy of guessing.
    sample_losses:
        Outputs and labels of N samples → loss of each sample, [N]; the training loss is their mean.
    right, accuracy:
        Outputs and labels → whether each sample is correct, [N] bool; and what that is in words.
    batch_size:
        Samples in a training batch; 0 for all. Each epoch is one permutation, a function of seed
        and epoch; its last batch may be smaller.
    cheap, thorough:
        Progress measures by name besides the norm of all weights, called without gradients and in
        evaluation mode, those that take long in thorough evaluations only; one that needs gradients enables
        them and never writes to ``.grad``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    split: Split
    seed: int
    chance: float
    sample_losses: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    right: Callable[[Tensor, Tensor], Tensor] = largest_is_label
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    batch_size: int = 0
    accuracy: str = "share of samples whose largest output is the label"
    cheap: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    thorough: Mapping[str, Callable[[], float]] = field(default_factory=dict)

    @classmethod
    def with_adamw(
        cls, model: nn.Module, split: Split, seed: int, training: AdamWTraining, **options: Any
    ) -> Self:
        """Return a task with the optimizer, schedule and batch size of ``training``."""
        optimizer = adamw(model, training)
        clip_gradients(optimizer, model.parameters(), training.clip)
        scheduler = linear_warmup(optimizer, training.warmup)
        batch = {"batch_size": training.batch_size, **options}
        return cls(model, optimizer, split, seed, scheduler=scheduler, **batch)

    def __post_init__(self) -> None:
        inputs, labels = self.split.train_inputs, self.split.train_labels
        draw = generator(self.seed, "probe")
        chosen = torch.randperm(len(inputs), generator=draw)[:PROBE_SIZE].to(inputs.device)
        self.probe: Batch = (inputs[chosen], labels[chosen])
        self.probe_rows: list[int] = chosen.tolist()
        unseen, truth = self.split.test_inputs, self.split.test_labels
        chosen = torch.randperm(len(unseen), generator=generator(self.seed, "held-out"))[:PROBE_SIZE]
        self.held_out: Batch = (unseen[chosen.to(unseen.device)], truth[chosen.to(unseen.device)])
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> Batch:
        """Return inputs and labels of ``step``, counted from 0; a function of seed and step alone."""
        inputs, labels = self.split.train_inputs, self.split.train_labels
        if not 0 < self.batch_size < len(inputs):
            return inputs, labels
        epoch, row = divmod(step, -(-len(inputs) // self.batch_size))
        if epoch != self._epoch:
            order = torch.randperm(len(inputs), generator=generator(self.seed, f"epoch {epoch}"))
            self._epoch, self._order = epoch, order.to(inputs.device)
        chosen = self._order[row * self.batch_size : (row + 1) * self.batch_size]
        return inputs[chosen], labels[chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the samples of ``batch``."""
        return self.sample_losses(model(batch[0]), batch[1]).mean()

    def sample_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the samples of ``batch``."""
        return self.sample_losses(model(batch[0]), batch[1]).sum()

    def train_step(self, step: int, on_gradients: Callable[[], None] = lambda: None) -> Tensor:
        """Train ``step`` and return its loss; ``on_gradients`` is called between backward and update."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, self.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        on_gradients()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def inputs(self, batch: Batch) -> Tensor | None:
        """Return the input if it is real-valued; token ids have no input AGOP."""
        return batch[0] if batch[0].is_floating_point() else None

    def evaluate(self, *, thorough: bool) -> dict[str, float]:
        """Return losses, accuracies and progress measures without changing the training state."""
        split = self.split
        with evaluation_mode(self.model):
            train_loss, train_accuracy = self.score(split.train_inputs, split.train_labels)
            test_loss, test_accuracy = self.score(split.test_inputs, split.test_labels)
            due = {**self.cheap, **(self.thorough if thorough else {})}
            return {
                "train_loss": train_loss,
                "test_loss": test_loss,
                "train_accuracy": train_accuracy,
                "test_accuracy": test_accuracy,
                "progress/weight_norm": weight_norm(self.model.parameters()),
                **{f"progress/{name}": float(measure()) for name, measure in due.items()},
            }

    def score(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return mean loss and accuracy of ``inputs``, a chunk at a time, summed in fp64."""
        loss, right = 0.0, 0
        for start in range(0, len(inputs), EVALUATION_CHUNK):
            truth = labels[start : start + EVALUATION_CHUNK]
            outputs = self.model(inputs[start : start + EVALUATION_CHUNK])
            loss += float(self.sample_losses(outputs, truth).sum(dtype=torch.float64))
            right += int(self.right(outputs, truth).sum())
        return loss / len(inputs), right / len(inputs)

    def before_step(self, step: int) -> None:
        """Do what the experiment does at set steps (prune, rewind, change a rate); here nothing."""

    def extra_state(self) -> dict[str, Any]:
        """Return tensors and plain values, beyond model and optimizer, that a resumed task needs."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`extra_state` returned."""
