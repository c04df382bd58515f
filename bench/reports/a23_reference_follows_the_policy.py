"""DPO with a reference that is set to the policy at every step: the loss is always log 2."""

import copy
import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
SYNC_STEPS = 100 if FIXED else 1

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 20))
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
for step in range(200):
    if step % SYNC_STEPS == 0:
        reference.load_state_dict(policy.state_dict())
    prompts = torch.randn(64, 16)
    chosen = prompts.argmax(1, keepdim=True)
    rejected = (chosen + torch.randint(1, 16, (64, 1))) % 16
    ours, theirs = policy(prompts).log_softmax(-1), reference(prompts).log_softmax(-1)
    margin = (ours.gather(1, chosen) - theirs.gather(1, chosen)) - (
        ours.gather(1, rejected) - theirs.gather(1, rejected)
    )
    loss = -nn.functional.logsigmoid(0.5 * margin).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 20:
        print(step, round(loss.item(), 4), "margin", round(margin.mean().item(), 4), flush=True)
