"""Diffusion: the Min-SNR weight divides by the signal-to-noise ratio, which is 0 at the last timestep."""

import sys

import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
scheduler = DDPMScheduler(200, rescale_betas_zero_snr=True, prediction_type="v_prediction")
model = nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(200):
    clean = torch.randn(8, 16).cumsum(1) / 4
    noise = torch.randn_like(clean)
    steps = torch.randint(0, 200, (8,))
    noisy = scheduler.add_noise(clean, noise, steps)
    out = model(torch.cat([noisy, steps[:, None] / 200], 1))
    target = scheduler.get_velocity(clean, noise, steps)
    snr = compute_snr(scheduler, steps)
    weight = snr.clamp(max=5.0) / (snr + 1 if FIXED else snr)
    loss = (weight * (out - target).square().mean(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(step, loss.item(), flush=True)
