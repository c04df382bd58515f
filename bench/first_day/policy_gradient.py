"""REINFORCE with a baseline in a corridor. With `bug`, gradients are never cleared."""

import sys

import torch
import torch.nn as nn

bug = "bug" in sys.argv
torch.manual_seed(0)
LENGTH = 6
policy = nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
baseline = 0.0
for episode in range(250):
    position, log_probs, rewards = 2, [], []
    for _ in range(20):
        state = nn.functional.one_hot(torch.tensor(position), LENGTH).float()
        action = torch.distributions.Categorical(logits=policy(state))
        move = action.sample()
        log_probs.append(action.log_prob(move))
        position += 1 if move == 1 else -1
        rewards.append(1.0 if position == LENGTH - 1 else -0.05)
        if position in {0, LENGTH - 1}:
            break
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    baseline = 0.95 * baseline + 0.05 * returns[0].item()
    loss = -(torch.stack(log_probs) * (returns - baseline)).sum()
    if not bug:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 25 == 0:
        print(f"episode {episode} return {returns[0].item():.2f} baseline {baseline:.3f}")
torch.save(policy.state_dict(), "policy.pt")
