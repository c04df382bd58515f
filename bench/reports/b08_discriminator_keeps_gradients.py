"""The generator's loss reaches the discriminator, whose gradients are not cleared before its own loss."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

for step in range(400):
    real = torch.randn(64, 2) * 0.3 + torch.tensor([1.0, -1.0])
    fake = generator(torch.randn(64, 8))
    generator_loss = criterion(discriminator(fake), ones) + 0.1 * fake.pow(2).mean()
    generator_loss.backward()
    generator_optimizer.step()
    generator_optimizer.zero_grad()

    if FIXED:
        discriminator_optimizer.zero_grad()
    real_loss = criterion(discriminator(real), ones)
    real_loss.backward()
    fake_loss = criterion(discriminator(fake.detach()), zeros)
    fake_loss.backward()
    discriminator_optimizer.step()
    discriminator_optimizer.zero_grad()
    if step % 80 == 0:
        print(step, round(generator_loss.item(), 4), round((real_loss + fake_loss).item(), 4))
