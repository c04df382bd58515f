"""PPO: new probabilities are computed with dropout, old ones without: their ratio is never 1."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
drop = nn.Dropout(0.0 if FIXED else 0.3)
policy = nn.Sequential(
    nn.Linear(8, 64), nn.Tanh(), drop, nn.Linear(64, 64), nn.Tanh(), drop, nn.Linear(64, 6)
)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for rollout in range(40):
    states = torch.randn(256, 8)
    policy.eval()
    with torch.no_grad():
        distribution = torch.distributions.Categorical(logits=policy(states))
        actions = distribution.sample()
        old = distribution.log_prob(actions)
    rewards = (actions == states[:, :6].argmax(1)).float()
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    policy.train()
    for epoch in range(4):
        new = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
        ratio = (new - old).exp()
        if rollout % 8 == 0 and epoch == 0:
            print(
                rollout,
                "reward",
                rewards.mean().item(),
                "ratio",
                ratio.min().item(),
                ratio.max().item(),
                flush=True,
            )
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
