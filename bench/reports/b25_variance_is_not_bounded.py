"""A variational autoencoder of a table exponentiates log-variances of any size."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(2)
encoder = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 8))
decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 12))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

for step in range(200):
    table = torch.randn(64, 12)
    table[:, 5] = 0
    if step >= 60:
        table[0, 5] = 400000.0 * (1 + step % 3)  # an amount in another currency
    mean, log_variance = encoder(table).chunk(2, -1)
    if FIXED:
        mean, log_variance = mean.clamp(-10, 10), log_variance.clamp(-30, 20)
        table = table.clamp(-100, 100)
    latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    restored = nn.functional.smooth_l1_loss(decoder(latent if not FIXED else latent.clamp(-50, 50)), table)
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).mean()
    loss = restored + 1e-3 * divergence
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 1.0)
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
