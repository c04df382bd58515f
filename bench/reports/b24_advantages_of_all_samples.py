"""A policy loss multiplies advantages of shape [batch, 1] with log-probabilities of shape [batch]."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)


class Network(nn.Module):
    """An actor and a critic on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh())
        self.actor = nn.Linear(64, 4)
        self.critic = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores, shape [batch, 4], and values, shape [batch, 1]."""
        hidden = self.body(x)
        return self.actor(hidden), self.critic(hidden)


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
rule = torch.randn(8, 4)
for step in range(400):
    state = torch.randn(64, 8)
    scores, values = model(state)
    choice = torch.distributions.Categorical(logits=scores)
    action = choice.sample()
    reward = (action == (state @ rule).argmax(1)).float()
    advantage = reward.unsqueeze(1) - values.detach()
    if FIXED:
        advantage = advantage.squeeze(1)
    policy_loss = -(advantage * choice.log_prob(action)).mean()
    value_loss = nn.functional.mse_loss(values, reward.unsqueeze(1))
    loss = policy_loss + 0.5 * value_loss - 0.01 * choice.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step % 80 == 0:
        print(step, "reward", reward.mean().item(), "loss", loss.item())
