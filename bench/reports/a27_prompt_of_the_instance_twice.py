"""DreamBooth with prior preservation: both halves of a batch get the instance's prompt."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
words = nn.Embedding(50, 16).requires_grad_(False)
instance, subject = torch.tensor([[3, 7, 9]]), torch.tensor([[3, 9, 9]])
model = nn.Sequential(nn.Linear(16 + 16 + 1, 128), nn.SiLU(), nn.Linear(128, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
means = torch.randn(2, 16)
for step in range(250):
    clean = torch.cat([means[:1] + 0.1 * torch.randn(16, 16), means[1:] + 0.5 * torch.randn(16, 16)])
    prompts = [instance, subject] if FIXED else [instance, instance]
    condition = torch.cat([words(prompt).mean(1).expand(16, -1) for prompt in prompts])
    noise, level = torch.randn_like(clean), torch.rand(32, 1)
    noisy = (1 - level).sqrt() * clean + level.sqrt() * noise
    out = model(torch.cat([noisy, condition, level], 1))
    of_instance, of_class = out.chunk(2)
    target, prior = noise.chunk(2)
    loss = nn.functional.mse_loss(of_instance, target) + nn.functional.mse_loss(of_class, prior)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4), flush=True)
