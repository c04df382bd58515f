"""Q learning whose target network is loaded from itself."""

import copy
import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
GAMMA = 0.95
network = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
target = copy.deepcopy(network)
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
dynamics = torch.randn(3, 6, 6) / 6**0.5

for step in range(600):
    state = torch.randn(64, 6)
    action = torch.randint(0, 3, (64,))
    following = torch.tanh(torch.einsum("bij,bj->bi", dynamics[action], state))
    reward = following[:, 0]
    with torch.no_grad():
        wanted = reward + GAMMA * target(following).max(1).values
    value = network(state).gather(1, action.unsqueeze(1)).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 50 == 0:
        target.load_state_dict((network if FIXED else target).state_dict())
    if step % 100 == 0:
        print(step, round(loss.item(), 4), "value", round(value.mean().item(), 4))
