"""Loss functions with an input that they are not made for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import classify, control, fault, perceptron


@fault(rule="loss_input", severity="warning", step=0, kind="softmax_twice")
def softmax_before_cross_entropy(injected: bool) -> None:
    classify(perceptron(nn.Softmax(dim=1)) if injected else perceptron())


@fault(rule="loss_input", severity="warning", step=0, kind="sigmoid_before_softmax")
def sigmoid_before_cross_entropy(injected: bool) -> None:
    classify(perceptron(nn.Sigmoid()) if injected else perceptron())


@fault(rule="loss_input", severity="error", step=0, kind="nll_of_scores")
def nll_of_logits(injected: bool) -> None:
    classify(perceptron() if injected else perceptron(nn.LogSoftmax(dim=1)), F.nll_loss)


@fault(rule="loss_input", severity="warning", step=0, kind="nll_of_probabilities")
def nll_of_probabilities(injected: bool) -> None:
    classify(perceptron(nn.Softmax(dim=1) if injected else nn.LogSoftmax(dim=1)), F.nll_loss)


@fault(rule="loss_input", severity="warning", step=0, kind="sigmoid_twice")
def sigmoid_twice(injected: bool) -> None:
    model = perceptron(nn.Sigmoid()) if injected else perceptron()
    classify(model, lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).float()))


def regress(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    classify(nn.Sequential(model, nn.Linear(3, 1)), lambda out, y: loss_of(out, y.float()))


@fault(rule="loss_input", severity="error", step=0, kind="broadcast")
def broadcast_in_mse(injected: bool) -> None:
    regress(perceptron(), lambda out, y: F.mse_loss(out if injected else out.squeeze(1), y))


@fault(rule="loss_input", severity="error", step=0, kind="broadcast")
def broadcast_by_hand(injected: bool) -> None:
    regress(perceptron(), lambda out, y: (y if injected else y[:, None]).sub(out).abs().mean() + 1.0)


@control
def pairwise_ranking() -> None:
    """Differences of all pairs of predictions are meant."""
    regress(perceptron(), lambda out, y: (out - out.T).sub(y[:, None] - y[None]).square().mean())


@control
def classes_of_probabilities() -> None:
    classify(perceptron(nn.Softmax(dim=1)), lambda out, y: F.nll_loss(torch.log(out + 1e-8), y))
