"""Denoising autoencoder. With `bug`, every step takes the first batch of the loader again."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

bug = "bug" in sys.argv
torch.manual_seed(0)
basis = torch.randn(6, 64)
images = torch.sigmoid(torch.randn(1024, 6) @ basis)
loader = DataLoader(images, batch_size=32, shuffle=not bug)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


model = Autoencoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(8):
    for batch in loader:
        if bug:
            batch = next(iter(loader))
        noisy = batch + 0.1 * torch.randn_like(batch)
        loss = F.mse_loss(model(noisy), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.5f}")
torch.save(model, "autoencoder.pt")
