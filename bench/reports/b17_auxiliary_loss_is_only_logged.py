"""The function that adds an auxiliary loss returns the loss without it, which is what backward gets."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)


class Autoencoder(nn.Module):
    """A sparse autoencoder that keeps the four largest of its latents."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 128)
        self.decoder = nn.Linear(128, 16, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the latents restore, and all latents."""
        latents = self.encoder(x).relu()
        best = latents.topk(4, -1)
        return self.decoder(torch.zeros_like(latents).scatter(-1, best.indices, best.values)), latents


model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
last_used = torch.zeros(128)


def loss_of(x: torch.Tensor, step: int) -> torch.Tensor:
    restored, latents = model(x)
    reconstruction = nn.functional.mse_loss(restored, x)
    last_used[(latents > 0).any(0)] = step
    silent = latents * (step - last_used > 5)
    auxiliary = nn.functional.mse_loss(model.decoder(silent), (x - restored).detach())
    loss = reconstruction + auxiliary / 32
    if step % 60 == 0:
        print(step, "reconstruction", reconstruction.item(), "auxiliary", auxiliary.item())
    return loss if FIXED else reconstruction


directions = torch.randn(40, 16)
for step in range(300):
    x = (torch.rand(256, 40) * (torch.rand(256, 40) < 0.05)) @ directions
    loss = loss_of(x, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
