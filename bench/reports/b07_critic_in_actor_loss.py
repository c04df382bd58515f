"""An actor and its critic, whose baseline is part of the actor's graph."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
CITIES = 8
actor = nn.Sequential(nn.Linear(2 * CITIES, 64), nn.Tanh(), nn.Linear(64, CITIES))
critic = nn.Sequential(nn.Linear(2 * CITIES, 64), nn.Tanh(), nn.Linear(64, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

for step in range(400):
    cities = torch.rand(128, CITIES, 2)
    state = cities.flatten(1)
    choice = torch.distributions.Categorical(logits=actor(state))
    action = choice.sample()
    length = (cities[torch.arange(128), action] - 0.5).norm(dim=1)
    baseline = critic(state).squeeze(1)
    advantage = length - (baseline.detach() if FIXED else baseline)
    actor_loss = (advantage * choice.log_prob(action)).mean()
    critic_loss = nn.functional.mse_loss(baseline, length)
    actor_optimizer.zero_grad()
    critic_optimizer.zero_grad()
    (actor_loss + critic_loss).backward()
    nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    actor_optimizer.step()
    critic_optimizer.step()
    if step % 80 == 0:
        print(step, "length", round(length.mean().item(), 4), "critic", round(critic_loss.item(), 4))
