"""Double Q learning whose policy and target are one network under two names."""

import copy
import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
GAMMA = 0.98


class Agent:
    """A policy network and its target network."""

    def __init__(self, network: nn.Module) -> None:
        self.policy = network
        self.target = copy.deepcopy(network) if FIXED else network
        for of_target, of_policy in zip(self.target.parameters(), self.policy.parameters(), strict=True):
            of_target.data.copy_(of_policy.data)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-3)

    def update(
        self, state: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, after: torch.Tensor
    ) -> float:
        """Take a step, and return its loss."""
        value = self.policy(state).gather(1, action[:, None]).squeeze(1)
        best = self.policy(after).argmax(1, keepdim=True)
        wanted = reward + GAMMA * self.target(after).gather(1, best).squeeze(1)
        loss = nn.functional.mse_loss(value, wanted.detach())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


agent = Agent(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)))
dynamics = torch.randn(3, 6, 6) / 6**0.5
for step in range(500):
    state = torch.randn(64, 6)
    action = torch.randint(0, 3, (64,))
    after = torch.tanh(torch.einsum("bij,bj->bi", dynamics[action], state))
    loss = agent.update(state, action, after[:, 0], after)
    if (step + 1) % 100 == 0:
        agent.target.load_state_dict(agent.policy.state_dict())
        print(step, loss)
