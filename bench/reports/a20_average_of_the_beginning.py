"""Samples come from an average with a decay of .9999 after few steps: it is nearly the first model."""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(17, 128), nn.SiLU(), nn.Linear(128, 16))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98 if FIXED else 0.9999))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
mixing = torch.randn(16, 16) / 4


def loss_of(net: nn.Module) -> torch.Tensor:
    """Return the loss of a denoiser on new data."""
    clean, level = torch.randn(128, 16) @ mixing, torch.rand(128, 1)
    noise = torch.randn_like(clean)
    noisy = (1 - level).sqrt() * clean + level.sqrt() * noise
    return nn.functional.mse_loss(net(torch.cat([noisy, level], 1)), noise)


for step in range(400):
    loss = loss_of(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    if step % 100 == 99:
        average.eval()
        with torch.no_grad():
            print(step, round(loss.item(), 4), "average", round(loss_of(average).item(), 4), flush=True)
