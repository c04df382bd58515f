"""Policy losses, and other products with log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import batches, control, fault, perceptron

STEPS = 6


def agent(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], *, shares: bool = False) -> None:
    """Train an actor and a critic: ``loss_of`` gets scores, values and rewards of one choice per state."""
    actor = perceptron()
    critic = nn.Linear(3, 1) if shares else nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    for x, y in batches(STEPS):
        scores = actor(x)
        values = critic(scores.tanh() if shares else x)[:, 0]
        optimizer.zero_grad()
        (loss_of(scores, values, y.float()) + F.mse_loss(values, y.float())).backward()
        optimizer.step()


def policy_loss(scores: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    choice = torch.distributions.Categorical(logits=scores)
    return -((rewards - values) * choice.log_prob(choice.sample())).mean()


@fault(rule="loss_input", kind="advantage", severity="warning", step=0, names="advantage")
def advantage_with_a_gradient(injected: bool) -> None:
    agent(policy_loss if injected else lambda s, v, r: policy_loss(s, v.detach(), r))


def written_out(scores: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    chosen = scores.log_softmax(-1).gather(1, scores.softmax(-1).multinomial(1)).squeeze(1)
    return (-chosen * (rewards - values)).sum()


@fault(rule="loss_input", kind="advantage", severity="warning", step=0, names="advantage")
def advantage_with_a_gradient_written_out(injected: bool) -> None:
    agent(written_out if injected else lambda s, v, r: written_out(s, v.detach(), r))


def focal(scores: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    chosen = scores.log_softmax(-1).gather(1, rewards.long()[:, None]).squeeze(1)
    return -((torch.ones_like(chosen) - chosen.exp()) * chosen).mean() + values.mean()


@control
def focal_loss() -> None:
    """The weight is a difference from something fixed, and is made of the same scores."""
    agent(focal)


def focal_of_softmax(scores: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    labels = rewards.long()[:, None]
    probability = scores.softmax(-1).gather(1, labels)
    weight = torch.ones_like(probability) - probability
    return -(weight * scores.log_softmax(-1).gather(1, labels)).mean() + values.mean()


@control
def focal_loss_of_a_softmax() -> None:
    agent(focal_of_softmax)


def bound(scores: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    chosen = scores.log_softmax(-1).gather(1, rewards.long()[:, None]).squeeze(1)
    return -(values.sigmoid() * chosen).mean()


@control
def learned_probability_as_weight() -> None:
    """Of a latent variable: the weight of a term is the probability that another network gives it."""
    agent(bound)


def clipped_ratio(scores: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    choice = torch.distributions.Categorical(logits=scores)
    action = choice.sample()
    old = choice.log_prob(action).detach() + 0.1
    ratio, advantage = (choice.log_prob(action) - old).exp(), rewards - values.detach()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


@control
def ratio_that_is_clipped() -> None:
    agent(clipped_ratio)


def entropy(scores: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    return (
        policy_loss(scores, values.detach(), rewards)
        - torch.distributions.Categorical(logits=scores).entropy().mean()
    )


@control
def entropy_that_is_rewarded() -> None:
    agent(entropy, shares=True)


def distilled(scores: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
    logarithms = scores.log_softmax(-1)
    return (logarithms.exp() * (logarithms - torch.zeros_like(logarithms).log_softmax(-1))).sum(
        -1
    ).mean() + values.mean()


@control
def divergence_written_out() -> None:
    agent(distilled)
